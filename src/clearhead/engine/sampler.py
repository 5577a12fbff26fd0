"""Choose the next token of every sequence of a step. The options of a batch stay on the device while it stays the same.

sampler = Sampler(vocab_size, device); choices = sampler.choose(batch.sampled, logits)
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.engine.sequence import EngineSequence
from clearhead.engine.token_filters import allowed_tokens
from clearhead.sampling import (
    SamplingParameters,
    TokenCounts,
    TokenLogprobs,
    accept_tokens,
    next_tokens,
    sampling_device,
    token_logprobs,
)


class Choice(NamedTuple):
    """The next token of a sequence; None if its logits are not finite or its token filter is at fault (`error`)."""

    token: int | None
    logprobs: TokenLogprobs | None
    error: str | None = None


Choices = list[tuple[EngineSequence, Choice]]


class Sampler:
    """The sampling options of the sequences that were sampled last."""

    def __init__(self, vocab_size: int, device: torch.device):
        self.vocab_size = vocab_size
        self.device = sampling_device(device)
        self.sequences: list[EngineSequence] = []
        self.parameters: SamplingParameters | None = None

    @torch.inference_mode()
    def choose(self, sequences: Sequence[EngineSequence], logits: Tensor) -> Choices:
        """Return the next tokens of sequences for logits (L, V). Nothing is added to the sequences.

        A sequence with a draft occurs once for its last token and once for each drafted one, and may get several.
        """
        plain = [row for row, sequence in enumerate(sequences) if sequence.draft is None]
        if len(plain) == len(sequences):
            return list(zip(sequences, self._next_tokens(sequences, logits), strict=True))
        others = [sequences[row] for row in plain]
        choices = list(zip(others, self._next_tokens(others, logits[plain]), strict=True)) if plain else []
        for sequence in dict.fromkeys(each for each in sequences if each.draft is not None):
            rows = [row for row, each in enumerate(sequences) if each is sequence]
            choices += [(sequence, choice) for choice in self._accept_draft(sequence, logits[rows])]
        return choices

    def _accept_draft(self, sequence: EngineSequence, logits: Tensor) -> list[Choice]:
        """Return the accepted tokens of a draft of n tokens, and one more; logits (n + 1, V)."""
        logits = logits.to(self.device)
        if not logits.amax(dim=-1).isfinite().all():
            return [Choice(None, None)]
        outputs = [[*sequence.output, *sequence.drafted[:n]] for n in range(len(logits))]
        options = [sequence.request.options] * len(logits)
        parameters = SamplingParameters.from_options(options, self.vocab_size, self.device)
        steps = torch.tensor([len(output) for output in outputs], device=self.device)
        counts = None
        if parameters.needs_counts:
            prompts = [sequence.request.prompt] * len(logits)
            counts = TokenCounts.from_tokens(prompts, outputs, self.vocab_size, self.device)
        tokens = accept_tokens(logits, sequence.draft, parameters, steps, counts)
        chosen = torch.tensor(tokens, device=self.device)
        return [Choice(token, self.logprobs(sequence, logits, chosen, row)) for row, token in enumerate(tokens)]

    def _next_tokens(self, sequences: Sequence[EngineSequence], logits: Tensor) -> list[Choice]:
        """Return the next token of each sequence, without drafts."""
        parameters = self.parameters_of(sequences)
        steps = torch.tensor([len(sequence.output) for sequence in sequences], device=self.device)
        counts = None
        if parameters.needs_counts:
            prompts = [sequence.request.prompt for sequence in sequences]
            outputs = [sequence.output for sequence in sequences]
            counts = TokenCounts.from_tokens(prompts, outputs, self.vocab_size, self.device)
        logits = logits.to(self.device)
        allowed, errors = allowed_tokens(sequences, self.vocab_size)
        tokens = next_tokens(logits, parameters, steps, counts, None if allowed is None else allowed.to(self.device))
        # argmax treats NaN and infinity as the largest values, so the chosen logits show any of them.
        is_finite = logits.gather(1, tokens[:, None])[:, 0].isfinite()
        rows = zip(sequences, tokens.tolist(), is_finite.tolist(), strict=True)
        return [
            Choice(None, None, errors[row])
            if row in errors
            else Choice(token if finite else None, self.logprobs(sequence, logits, tokens, row))
            for row, (sequence, token, finite) in enumerate(rows)
        ]

    def parameters_of(self, sequences: Sequence[EngineSequence]) -> SamplingParameters:
        """Return the options of these sequences as tensors, the same ones as before if the sequences are the same."""
        if self.parameters is None or self.sequences != list(sequences):
            options = [sequence.request.options for sequence in sequences]
            self.parameters = SamplingParameters.from_options(options, self.vocab_size, self.device)
            self.sequences = list(sequences)
        return self.parameters

    def logprobs(self, sequence: EngineSequence, logits: Tensor, tokens: Tensor, row: int) -> TokenLogprobs | None:
        """Return the log-probabilities that a request asks for, given its row of the logits (L, V) and tokens (L,)."""
        num_top = sequence.request.options.logprobs
        return None if num_top is None else token_logprobs(logits[row], tokens[row], num_top)
