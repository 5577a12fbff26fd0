"""The model under test, the sequences it reads, and the logits that every check compares with.

    case = VerificationCase.create(model, num_new_tokens=64); case.expected[0]   # (1, T, V): the logits of sequence 0

`expected` has the logits of each sequence, read at once, alone and without a cache. An encoder-decoder reads `sources`;
its sequences are then what the decoder reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.api import Model
from clearhead.architecture import Chunked, LearnedPositions, ModelConfig, SlidingWindow, Stack
from clearhead.errors import ClearheadError
from clearhead.generation import TokenSequence, decode, encode_sources, pad_right
from clearhead.model import EncoderOutput, Transformer
from clearhead.options import SamplingOptions

_DEFAULT_LENGTH = 96  # tokens of the longest sequence
_MIN_LENGTH = 24  # with fewer tokens some checks have nothing to compare
_MAX_DEFAULT_WINDOW = 1024  # sequences are made longer than windows up to this size
_RELATIVE_LENGTHS = (1.0, 0.64, 0.24)  # of the sequences of a batch
_SMALL_MODEL_PARAMETERS = 10**9  # a larger model generates fewer tokens by default
_NEW_TOKENS, _NEW_TOKENS_LARGE_MODEL = 256, 32
_NO_LIMIT = 2**31  # context length of models without learned positions
Side = Literal["left", "right"]

TEXT = """\
A letter posted in the morning crosses the river by noon, and the clerk who sorts it knows nothing of what it says. \
He reads the address, looks along the shelf and drops it into one of forty boxes. Some boxes fill up, others stay \
empty for weeks. In winter, when the ferry does not run, the letters wait in order of arrival; in spring they leave \
all at once, and each must still find the right door. Numbers help: 7, 12, 365 and 1,024 are easier to tell apart \
than names. So do habits, for whoever wrote to the mill last year will write to the mill again.
"""


@dataclass(frozen=True)
class VerificationCase:
    """A model, the sequences it reads, and the number of tokens it generates."""

    model: Model
    sequences: Sequence[list[int]]  # the longest first
    sources: Sequence[list[int]]  # what the encoder of an encoder-decoder reads for each sequence; empty otherwise
    num_new_tokens: int
    compiles: bool = False

    @staticmethod
    def create(
        model: Model, *, length: int | None = None, num_new_tokens: int | None = None, compiles: bool = False
    ) -> "VerificationCase":
        """Choose sequences for a model; raise ClearheadError if `length` or `num_new_tokens` do not fit it."""
        config, max_length = model.config, _choose_length(model.config, length)
        lengths = [round(part * max_length) for part in _RELATIVE_LENGTHS]
        if config.encoder is None or config.decoder is None:
            sequences, sources = _text_ids(model, config.vocab_size, lengths), []
            num_new_tokens = _choose_num_new_tokens(model, num_new_tokens, prompt_length=max_length)
        else:
            sources = _text_ids(model, config.encoder.token_embedding.vocab_size, lengths[::-1])
            start_id = model.text_generator.start_id
            sequences = [[start_id, *ids[1:]] for ids in _random_ids(config.vocab_size, lengths)]
            num_new_tokens = _choose_num_new_tokens(model, num_new_tokens, prompt_length=1)
        return VerificationCase(model, sequences, sources, num_new_tokens, compiles)

    @property
    def network(self) -> Transformer:
        return self.model.network

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def dtype(self) -> torch.dtype:
        return network_dtype(self.network)

    @property
    def window(self) -> int | None:
        """The size of the largest sliding window or chunk of the output stack."""
        return _largest_window(self.config.output_stack)

    # --- inputs

    def tokens(self, index: int = 0) -> Tensor:
        """Return one sequence as a batch of its own (1, T)."""
        return torch.tensor([self.sequences[index]], device=self.device)

    def pad(self, sequences: Sequence[list[int]], side: Side) -> tuple[Tensor, Tensor]:
        """Return the tokens and the mask (B, T) of a padded batch."""
        tokens, mask = pad_right(sequences if side == "right" else [ids[::-1] for ids in sequences], self.device)
        return (tokens, mask) if side == "right" else (tokens.flip(1), mask.flip(1))

    def encoder_output(self, index: int | None = 0, side: Side = "right", **options: Any) -> EncoderOutput | None:
        """Return the encoder output of one source, or of all as a padded batch (None); None without an encoder."""
        if not self.sources:
            return None
        if index is not None:
            return self.network.encode(torch.tensor([self.sources[index]], device=self.device), **options)
        return self.network.encode(*self.pad(self.sources, side), **options)

    # --- outputs

    def compute_logits(
        self, tokens: Tensor, mask: Tensor | None = None, encoder_output: EncoderOutput | None = None, **options: Any
    ) -> Tensor:
        """Run one forward pass and return the logits (B, T, V), or without a language head the hidden states."""
        if self.network.head is None:
            return self.network.hidden_states(tokens, mask, **options)
        if encoder_output is None:
            return self.network(tokens, mask, **options)
        return self.network.decode(tokens, encoder_output, mask, **options)

    @cached_property
    def expected(self) -> list[Tensor]:
        """The logits (1, T, V) of each sequence, read at once and alone."""
        indices = range(len(self.sequences))
        return [self.compute_logits(self.tokens(i), encoder_output=self.encoder_output(i)) for i in indices]

    @cached_property
    def continuation(self) -> TokenSequence:
        """The first sequence with its continuation by greedy decoding."""
        sequence = self.prompt(0, self.num_new_tokens)
        for _ in decode(self.network, [sequence], encoder_output=self.encode_sources([0])):
            pass
        return sequence

    def prompt(self, index: int, num_new_tokens: int) -> TokenSequence:
        """Return a sequence to be continued; for an encoder-decoder, its start token only."""
        prompt = self.sequences[index][:1] if self.sources else self.sequences[index]
        return TokenSequence(prompt, SamplingOptions(max_new_tokens=num_new_tokens, logprobs=0))

    def encode_sources(self, indices: Sequence[int]) -> EncoderOutput | None:
        """Return the encoder output of some sources as generation computes it; None without an encoder."""
        return encode_sources(self.network, [self.sources[index] for index in indices]) if self.sources else None


def network_dtype(network: Transformer) -> torch.dtype:
    """Return the dtype of a network's first parameter."""
    return next(network.parameters()).dtype


def _choose_length(config: ModelConfig, length: int | None) -> int:
    """Return the length of the longest sequence: longer than the windows, within the learned positions."""
    stacks = [stack for stack in (config.encoder, config.decoder) if stack is not None]
    limit = min(_max_positions(stack) for stack in stacks)
    if limit < _MIN_LENGTH:
        raise ClearheadError(f"this model reads at most {limit} tokens; verification needs at least {_MIN_LENGTH}")
    if length is not None:
        if not _MIN_LENGTH <= length <= limit:
            valid = f"from {_MIN_LENGTH} to {limit}" if limit < _NO_LIMIT else f"at least {_MIN_LENGTH}"
            raise ClearheadError(f"length is {length}; for this model it must be {valid}")
        return length
    window = max(_largest_window(stack) or 0 for stack in stacks)
    preferred = (
        max(_DEFAULT_LENGTH, window + _DEFAULT_LENGTH // 2) if window <= _MAX_DEFAULT_WINDOW else _DEFAULT_LENGTH
    )
    return min(preferred, max(limit // 2, _MIN_LENGTH))


def _choose_num_new_tokens(model: Model, num_new_tokens: int | None, prompt_length: int) -> int:
    """Return how many tokens to generate after a prompt of this length."""
    if num_new_tokens is None:
        num_parameters = sum(parameter.numel() for parameter in model.network.parameters())
        num_new_tokens = _NEW_TOKENS if num_parameters <= _SMALL_MODEL_PARAMETERS else _NEW_TOKENS_LARGE_MODEL
    if num_new_tokens < 1:
        raise ClearheadError(f"the number of new tokens is {num_new_tokens}; it must be at least 1")
    return min(num_new_tokens, _max_positions(model.config.output_stack) - prompt_length + 1)


def _max_positions(stack: Stack) -> int:
    """Return the number of learned positions of a stack, or `_NO_LIMIT`."""
    positions = stack.token_embedding.positions
    return positions.num_positions if isinstance(positions, LearnedPositions) else _NO_LIMIT


def _largest_window(stack: Stack) -> int | None:
    """Return the size of the largest sliding window or chunk of a stack."""
    patterns = (layer.attention.pattern for layer in stack.layers)
    return max((pattern.size for pattern in patterns if isinstance(pattern, SlidingWindow | Chunked)), default=None)


def list_lengths(sequences: Sequence[list[int]]) -> str:
    """Return the lengths of sequences as text, such as "96, 61, 23"."""
    return ", ".join(str(len(sequence)) for sequence in sequences)


def _text_ids(model: Model, vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    """Return sequences of these lengths: parts of TEXT, or random ids if the model has no tokenizer."""
    if model.tokenizer is None:
        return _random_ids(vocab_size, lengths)
    ids = model.encode(TEXT)
    ids *= 2 + max(lengths) // len(ids)
    return [ids[7 * index : 7 * index + length] for index, length in enumerate(lengths)]


def _random_ids(vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    """Return sequences of random token ids, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]
