"""Checks of the decoding loops: every generated token must be the most likely one after those before it.

comparison = greedy(case); comparison.difference

The generated text is read once more in a full forward pass. Two differences count: between the logit of a token in the
loop and in the full pass, and between the latter and the largest logit at that position. If both are zero, the tokens
are those of decoding without a cache, since equal tokens up to a position give equal logits there. A tie within the
tolerance passes; the detail gives the number of equal tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from clearhead.generation import (
    Draft,
    SpeculationStats,
    TokenSequence,
    decode,
    decode_speculatively,
    rotation_depends_on_length,
)
from clearhead.verification.case import VerificationCase
from clearhead.verification.results import CheckSkipped, LogitComparison, LogitPair


def greedy(case: VerificationCase) -> LogitComparison:
    """Check greedy decoding of one sequence."""
    require_decoder(case)
    return compare_with_argmax(case, [case.continuation])


def batched_greedy(case: VerificationCase) -> LogitComparison:
    """Check prompts of different lengths in one batch, which end at different steps."""
    require_decoder(case)
    indices = range(len(case.sequences))
    sequences = [case.prompt(index, -(-case.num_new_tokens // (index + 1))) for index in indices]
    for _ in decode(case.network, sequences, encoder_output=case.encode_sources(indices)):
        pass
    return compare_with_argmax(case, sequences)


def speculative(case: VerificationCase) -> LogitComparison:
    """Check speculative decoding with drafts that are partly right."""
    require_decoder(case)
    if rotation_depends_on_length(case.config.output_stack):
        raise CheckSkipped("rotations depend on the length of the text including drafts")
    sequence, stats = case.prompt(0, case.num_new_tokens), SpeculationStats()
    drafter = _PartlyRightDrafter(case.continuation.tokens, case.config.vocab_size)
    encoder_output = case.encode_sources([0])
    for _ in decode_speculatively(case.network, sequence, drafter, encoder_output=encoder_output, stats=stats):
        pass
    comparison = compare_with_argmax(case, [sequence])
    accepted = f"{stats.num_accepted} of {stats.num_drafted} drafted tokens accepted"
    return LogitComparison(comparison.pairs, f"{comparison.detail}, {accepted}")


@dataclass(frozen=True)
class _PartlyRightDrafter:
    """Draft the known greedy continuation with every third token wrong, so that some are accepted and some rejected."""

    tokens: Sequence[int]
    vocab_size: int
    num_tokens: int = 4

    def draft(self, sequence: TokenSequence, count: int) -> Draft:
        """Return at most `count` tokens that may come next."""
        start = len(sequence.tokens)
        known = enumerate(self.tokens[start : start + count], start)
        return Draft([(token + (index % 3 == 2)) % self.vocab_size for index, token in known])


def require_decoder(case: VerificationCase) -> None:
    """Skip the check if the model has no decoder."""
    if case.config.decoder is None:
        raise CheckSkipped("an encoder-only model generates no tokens")


def compare_with_argmax(
    case: VerificationCase, sequences: Sequence[TokenSequence], indices: Sequence[int] | None = None
) -> LogitComparison:
    """Compare the logits of generated tokens with the largest logits of a full pass, and with those of the loop.

    indices: the source of each sequence, by its index in the case; None: the sequences are the first ones of the case.
    """
    with_largest: list[LogitPair] = []
    with_loop: list[LogitPair] = []
    for index, sequence in zip(indices or range(len(sequences)), sequences, strict=True):
        tokens = torch.tensor([[*sequence.prompt, *sequence.tokens]], device=case.device)
        num_prompt = len(sequence.prompt)
        logits = case.compute_logits(tokens[:, :-1], encoder_output=case.encoder_output(index))[0, num_prompt - 1 :]
        chosen = logits.gather(1, tokens[0, num_prompt:, None])[:, 0]
        with_largest.append((chosen, logits.amax(dim=1)))
        loop_logprobs = torch.stack([step.chosen for step in sequence.logprobs])
        with_loop.append((loop_logprobs + logits.logsumexp(dim=1), chosen))
    equal = torch.cat([chosen == largest for chosen, largest in with_largest])
    comparable = case.dtype != torch.float64  # a loop keeps log-probabilities in float32
    return LogitComparison(with_largest + with_loop * comparable, f"{int(equal.sum())} of {len(equal)} tokens equal")
