"""What is verified: a model, a few texts of different lengths for it to read, and how many tokens it makes.

    subject = Subject.of(model, num_new=64); subject.expected[0]   # (1, T, V): row 0 read whole, alone, without a cache

`expected` is what every check compares with. An encoder-decoder reads `sources`, and its rows are what it decodes.
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

LENGTH = 96  # tokens of the longest row, where nothing asks for another
WIDEST = 1024  # a window up to this is passed without being asked to
SMALL_MODEL = 10**9  # parameters; a larger one makes fewer tokens unasked
NEW_TOKENS, NEW_TOKENS_LARGE = 256, 32
PARTS = (1.0, 0.64, 0.24)  # how long the rows of a batch are, as parts of the longest
SHORTEST = 24  # a text below it leaves some of them nothing to compare
ENDLESS = 2**31  # tokens a model without learned positions can tell apart
Side = Literal["left", "right"]

TEXT = """\
A letter posted in the morning crosses the river by noon, and the clerk who sorts it knows nothing of what it says. \
He reads the address, looks along the shelf and drops it into one of forty boxes. Some boxes fill up, others stay \
empty for weeks. In winter, when the ferry does not run, the letters wait in order of arrival; in spring they leave \
all at once, and each must still find the right door. Numbers help: 7, 12, 365 and 1,024 are easier to tell apart \
than names. So do habits, for whoever wrote to the mill last year will write to the mill again.
"""


@dataclass(frozen=True)
class Subject:
    model: Model
    rows: Sequence[list[int]]  # the longest first
    sources: Sequence[list[int]]  # what an encoder-decoder reads for each row
    num_new: int
    compiles: bool = False

    @staticmethod
    def of(model: Model, *, length: int | None = None, num_new: int | None = None, compiles: bool = False) -> "Subject":
        config, longest = model.config, checked_length(model.config, length)
        lengths = [round(part * longest) for part in PARTS]
        if config.encoder is None or config.decoder is None:
            rows = texts(model, config.vocab_size, lengths)
            return Subject(model, rows, [], checked_count(model, num_new, longest), compiles)
        sources = texts(model, config.encoder.embedding.vocab_size, lengths[::-1])
        rows = [[model.text_generator.start_id, *row[1:]] for row in random_ids(config.vocab_size, lengths)]
        return Subject(model, rows, sources, checked_count(model, num_new, 1), compiles)

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
        return dtype_of(self.network)

    @property
    def window(self) -> int | None:
        """The widest of the decoder's windows or chunks."""
        return widest_window(self.config.output_stack)

    # --- what goes in

    def tokens(self, row: int = 0) -> Tensor:
        """(1, T)."""
        return torch.tensor([self.rows[row]], device=self.device)

    def padded(self, rows: Sequence[list[int]], side: Side) -> tuple[Tensor, Tensor]:
        """Tokens and mask (B, T)."""
        tokens, mask = pad_right(rows if side == "right" else [row[::-1] for row in rows], self.device)
        return (tokens, mask) if side == "right" else (tokens.flip(1), mask.flip(1))

    def encoder_output(self, row: int | None = 0, side: Side = "right", **options: Any) -> EncoderOutput | None:
        """Of one source alone, or of all as a batch."""
        if not self.sources:
            return None
        if row is not None:
            return self.network.encode(torch.tensor([self.sources[row]], device=self.device), **options)
        return self.network.encode(*self.padded(self.sources, side), **options)

    # --- what comes out

    def run(
        self, tokens: Tensor, mask: Tensor | None = None, encoder_output: EncoderOutput | None = None, **options: Any
    ) -> Tensor:
        """Logits (B, T, V)."""
        if encoder_output is None:
            return self.network(tokens, mask, **options)
        return self.network.decode(tokens, encoder_output, mask, **options)

    @cached_property
    def expected(self) -> list[Tensor]:
        """Logits (1, T, V) of each row, read whole and alone."""
        return [self.run(self.tokens(row), encoder_output=self.encoder_output(row)) for row in range(len(self.rows))]

    @cached_property
    def continuation(self) -> TokenSequence:
        """The first row, gone on greedily by the decode loop."""
        row = self.row(0, self.num_new)
        for _ in decode(self.network, [row], encoder_output=self.sources_of([0])):
            pass
        return row

    def row(self, number: int, num_new: int) -> TokenSequence:
        """A row before its first new token; an encoder-decoder's prompt is one token, its text being the source."""
        prompt = self.rows[number][:1] if self.sources else self.rows[number]
        return TokenSequence(prompt, SamplingOptions(max_new_tokens=num_new, logprobs=0))

    def sources_of(self, numbers: Sequence[int]) -> EncoderOutput | None:
        """As generation reads them."""
        return encode_sources(self.network, [self.sources[number] for number in numbers]) if self.sources else None


def dtype_of(network: Transformer) -> torch.dtype:
    return next(network.parameters()).dtype


def checked_length(config: ModelConfig, length: int | None) -> int:
    """Of the longest row: long enough to pass the windows, short enough for the positions there are."""
    stacks = [stack for stack in (config.encoder, config.decoder) if stack is not None]
    most = min(room(stack) for stack in stacks)
    if most < SHORTEST:
        raise ClearheadError(f"this model reads {most} tokens at most; to be verified it must read {SHORTEST}")
    if length is not None:
        if not SHORTEST <= length <= most:
            limit = f"from {SHORTEST} to {most}" if most < ENDLESS else f"{SHORTEST} or more"
            raise ClearheadError(f"length is {length}; for this model it must be {limit}")
        return length
    window = max(widest_window(stack) or 0 for stack in stacks)
    wanted = max(LENGTH, window + LENGTH // 2) if window <= WIDEST else LENGTH
    return min(wanted, max(most // 2, SHORTEST))


def checked_count(model: Model, num_new: int | None, length: int) -> int:
    """Tokens to make after a prompt of this length."""
    if num_new is None:
        size = sum(parameter.numel() for parameter in model.network.parameters())
        num_new = NEW_TOKENS if size <= SMALL_MODEL else NEW_TOKENS_LARGE
    if num_new < 1:
        raise ClearheadError(f"{num_new} new tokens show nothing; make it 1 or more")
    return min(num_new, room(model.config.output_stack) - length + 1)


def room(stack: Stack) -> int:
    """How many tokens it can tell apart."""
    positions = stack.embedding.positions
    return positions.num_positions if isinstance(positions, LearnedPositions) else ENDLESS


def widest_window(stack: Stack) -> int | None:
    reaches = (layer.attention.pattern for layer in stack.layers)
    return max((pattern.size for pattern in reaches if isinstance(pattern, SlidingWindow | Chunked)), default=None)


def lengths_of(rows: Sequence[list[int]]) -> str:
    return ", ".join(str(len(row)) for row in rows)


def texts(model: Model, vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    """Rows of these lengths: a paragraph from different places on, or random ids where there is no tokenizer."""
    if model.tokenizer is None:
        return random_ids(vocab_size, lengths)
    ids = model.encode(TEXT)
    ids *= 2 + max(lengths) // len(ids)
    return [ids[7 * row : 7 * row + length] for row, length in enumerate(lengths)]


def random_ids(vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]
