"""Static buffers of the sequences that a GPU decodes: each buffer has an entry for every seat.

    seats = Seats(num_seats=256, max_pages=512, vocab_size=128256, device=device); seats.assign(sequences)

A captured CUDA graph reads and writes these buffers, so their addresses never change. A sequence takes a seat, which
sets the entries of the seat, and keeps it until it ends; a step names the seats that it advances.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clearhead.options import SamplingOptions

# The fields of a seat in `integers` (fields, seats); all but the last one as in triton_logits.py.
_TOKEN, _POSITION, _STEP, _SEED, _TOP_K, _MIN_NEW, _ADJUSTED, _SOURCE_LENGTH = range(8)
_IN_PROMPT, _IS_STOP = 1 << 30, 1 << 29  # bits of `counts`


@dataclass(frozen=True, kw_only=True)
class SeatedSequence:
    """A sequence with the seat it takes, and all that a step needs to know of it.

    num_tokens: tokens of the sequence whose keys and values are in its pages when its next token is chosen, which is
    the length of a prompt. num_generated: how many of its tokens were generated before, after a preemption. tokens:
    all tokens so far, needed for penalties only; the last `num_generated` of them are output. source_pages,
    source_length: pages and number of the keys of an encoder-decoder's source.
    """

    seat: int
    num_tokens: int
    pages: Sequence[int]
    options: SamplingOptions
    num_generated: int = 0
    tokens: Sequence[int] = field(default=(), repr=False)
    source_pages: Sequence[int] = ()
    source_length: int = 0


class Seats:
    """The fields of all seats on the device, and the page tables of each."""

    def __init__(
        self, num_seats: int, max_pages: int, vocab_size: int, device: torch.device, max_source_pages: int = 0
    ):
        self.num_seats, self.vocab_size, self.device = num_seats, vocab_size, device
        self.integers = torch.zeros(8, num_seats, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(6, num_seats, dtype=torch.float32, device=device)
        self.page_tables = torch.zeros(num_seats, max_pages, dtype=torch.int32, device=device)
        self.source_tables = torch.zeros(num_seats, max_source_pages, dtype=torch.int32, device=device)
        self.active = torch.full((num_seats,), -1, dtype=torch.int32, device=device)  # the seats of the next step
        self.counts: Tensor | None = None  # (num_seats, V) int32, allocated when a sequence has penalties or a bias
        self.bias: Tensor | None = None  # (num_seats, V) float32
        self._adjusted: set[int] = set()  # seats with penalties, a bias or stop tokens that are not allowed yet
        self._last_active: tuple[int, ...] = ()

    @property
    def token(self) -> Tensor:
        """The next token of each seat to run through the network (num_seats,)."""
        return self.integers[_TOKEN]

    @property
    def position(self) -> Tensor:
        """The position of that token (num_seats,)."""
        return self.integers[_POSITION]

    @property
    def source_length(self) -> Tensor:
        """The number of keys of the source of each seat (num_seats,)."""
        return self.integers[_SOURCE_LENGTH]

    def assign(self, sequences: Sequence[SeatedSequence]) -> None:
        """Write the fields and page tables of these seats."""
        if not sequences:
            return
        seats = self.upload([sequence.seat for sequence in sequences])
        integers = [_integer_fields(sequence, self.vocab_size) for sequence in sequences]
        self.integers[:, seats] = self.upload(integers).T
        self.numbers[:, seats] = self.upload(
            [_number_fields(sequence.options) for sequence in sequences], torch.float32
        ).T
        self._write_tables(self.page_tables, seats, [sequence.pages for sequence in sequences])
        if self.source_tables.shape[1]:
            self._write_tables(self.source_tables, seats, [sequence.source_pages for sequence in sequences])
        for sequence in sequences:
            self._adjusted.discard(sequence.seat)
            if _is_adjusted(sequence.options):
                self._adjusted.add(sequence.seat)
                self._write_adjustments(sequence)

    def add_pages(self, seats: Sequence[int], numbers: Sequence[int], pages: Sequence[int]) -> None:
        """Write entry `numbers[i]` of the page table of `seats[i]`, because its sequence has grown to another page."""
        if seats:
            rows, entries, values = self.upload([list(seats), list(numbers), list(pages)])
            self.page_tables[rows, entries] = values.int()

    def _write_tables(self, tables: Tensor, seats: Tensor, pages: Sequence[Sequence[int]]) -> None:
        width = max(map(len, pages))
        padded = [[*each, *[0] * (width - len(each))] for each in pages]
        tables[seats, :width] = self.upload(padded, torch.int32)

    def activate(self, seats: Sequence[int], size: int) -> None:
        """Make these the seats of the next step, and fill `size` places with -1."""
        padded = (*seats, *(-1,) * (size - len(seats)))
        if padded != self._last_active:
            self.active[:size] = self.upload(list(padded), torch.int32)
            self._last_active = padded

    def needs_adjustment(self, seats: Sequence[int]) -> bool:
        """Return whether one of these seats has penalties, a bias or a minimum length."""
        return not self._adjusted.isdisjoint(seats)

    def upload(
        self, values: list[int] | list[list[int]] | list[list[float]], dtype: torch.dtype = torch.int64
    ) -> Tensor:
        """Copy numbers to the device without waiting for it."""
        tensor = torch.tensor(values, dtype=dtype)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _write_adjustments(self, sequence: SeatedSequence) -> None:
        """Write the bias, the stop tokens and the counts of earlier tokens of a sequence."""
        options, size = sequence.options, self.vocab_size
        if self.counts is None or self.bias is None:
            self.counts = torch.zeros(self.num_seats, size, dtype=torch.int32, device=self.device)
            self.bias = torch.zeros(self.num_seats, size, dtype=torch.float32, device=self.device)
        tokens = torch.tensor([token for token in sequence.tokens if token < size] or [], dtype=torch.int64)
        num_prompt = len(tokens) - sequence.num_generated
        counts = torch.bincount(tokens[num_prompt:], minlength=size).int()
        counts[tokens[:num_prompt]] |= _IN_PROMPT
        counts[list(options.stop_ids)] |= _IS_STOP
        bias = torch.zeros(size)
        for token, value in dict(options.logit_bias).items():
            bias[token] = value
        self.counts[sequence.seat].copy_(counts, non_blocking=True)
        self.bias[sequence.seat].copy_(bias, non_blocking=True)


def _is_adjusted(options: SamplingOptions) -> bool:
    penalties = options.repetition_penalty, options.presence_penalty, options.frequency_penalty
    return penalties != (1.0, 0.0, 0.0) or bool(options.logit_bias) or options.min_new_tokens > 0


def _integer_fields(sequence: SeatedSequence, vocab_size: int) -> list[int]:
    options = sequence.options
    top_k = options.top_k if options.top_k is not None and options.top_k < vocab_size else 0
    # Choosing a token advances the position and the step, so the position is still that of the last token.
    fields = {
        _TOKEN: 0, _POSITION: sequence.num_tokens - 1, _STEP: sequence.num_generated, _SEED: options.seed or 0,
        _TOP_K: top_k, _MIN_NEW: options.min_new_tokens, _ADJUSTED: int(_is_adjusted(options)),
        _SOURCE_LENGTH: sequence.source_length,
    }  # fmt: skip
    return [fields[number] for number in range(len(fields))]


def _number_fields(options: SamplingOptions) -> list[float]:
    tail = -1.0 if options.top_p is None or options.top_p == 1 else 1 - options.top_p
    penalties = options.repetition_penalty, options.presence_penalty, options.frequency_penalty
    return [options.temperature, tail, options.min_p or 0.0, *penalties]
