"""Run steps on an NVIDIA GPU: running sequences in captured CUDA graphs, prompts packed in one pass before them.

    if can_run_in_graphs(network): executor = GraphExecutor(network, storage, num_seats=256)

A sequence whose prompt has been read takes a seat: a row of the buffers that the graphs read and write. From then on
its tokens stay on the GPU; `start` returns before they are known, and `Pending.result` waits for their copy. A sequence
with a token filter or a drafter takes no seat: its tokens are read like a prompt, and chosen on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from clearhead.backends import AsyncTokens, PagedDecoder, SeatedSequence, triton_available, unsupported_network_reason
from clearhead.cache import PageCopy, PageStorage, PageTable
from clearhead.engine.batch import PackedBatch, source_layout, upload
from clearhead.engine.executor import Pending, encode_sources
from clearhead.engine.prompt_scores import score_prompts
from clearhead.engine.sampler import Choice, Choices, Sampler
from clearhead.engine.scheduler import ScheduledTokens
from clearhead.engine.sequence import EngineSequence
from clearhead.model import Transformer
from clearhead.sampling import token_logprobs

# A sequence may be twice as long as the context that the model was trained for; short contexts are often exceeded.
_LONGEST_SHARE, _MIN_LONGEST = 2, 8192
_MAX_SOURCE_TOKENS = 16384  # tokens that the encoder reads at once; more are not faster and need more memory


def can_run_in_graphs(network: Transformer) -> bool:
    """Return whether the kernels of the GPU support a network in its present state."""
    device = network.device
    if not triton_available(device) or unsupported_network_reason(network, "paged"):
        return False
    return device.index in (None, torch.cuda.current_device())  # graphs are captured on the current device


@dataclass(frozen=True)
class _Tokens:
    """The next tokens of some sequences, on their way to the host."""

    sequences: list[EngineSequence]
    tokens: AsyncTokens
    logits: dict[EngineSequence, Tensor]  # (V,) of sequences that ask for log-probabilities

    def result(self) -> Choices:
        """Wait for the tokens and return them; None for one whose logits are not finite."""
        pairs = zip(self.sequences, self.tokens.result(), strict=True)
        return [(sequence, self._choice(sequence, token)) for sequence, token in pairs]

    def _choice(self, sequence: EngineSequence, token: int) -> Choice:
        if token < 0:
            return Choice(None, None)
        logits, num_top = self.logits.get(sequence), sequence.request.options.logprobs
        if logits is None or num_top is None:
            return Choice(token, None)
        return Choice(token, token_logprobs(logits, torch.tensor(token, device=logits.device), num_top))


@dataclass(frozen=True)
class _Filtered:
    """The logits of sequences with filters or drafts, whose tokens are chosen on the host."""

    sequences: list[EngineSequence]
    logits: Tensor
    sampler: Sampler

    def result(self) -> Choices:
        """Choose the tokens and return them."""
        return self.sampler.choose(self.sequences, self.logits)


@dataclass(frozen=True)
class _Started:
    """The parts of a step: sequences whose prompts have now been read, and running sequences."""

    parts: list[Pending]

    def result(self) -> Choices:
        """Wait for all parts and return the next tokens."""
        return [choice for part in self.parts for choice in part.result()]


class GraphExecutor:
    """Run steps in the kernels of a PagedDecoder."""

    is_asynchronous = True

    def __init__(
        self,
        network: Transformer,
        storage: PageStorage,
        num_seats: int,
        source_storage: PageStorage | None = None,
    ):
        capacity = storage.pool.num_pages * storage.pool.page_size
        self.max_length: int | None = min(capacity, max(_LONGEST_SHARE * network.config.context, _MIN_LONGEST))
        self.storage = storage
        self.decoder = PagedDecoder(network, storage, num_seats, self.max_length, source_storage)
        self.sampler = Sampler(network.config.vocab_size, network.device)
        self.free_seats = list(reversed(range(num_seats)))
        self.seats: dict[EngineSequence, int] = {}
        self.num_pages: dict[EngineSequence, int] = {}  # how many entries of its page table a seat has

    @torch.inference_mode()
    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages before they are written to (`PageCopy`)."""
        for copy in copies:
            self.storage.copy_page(*copy)

    @torch.inference_mode()
    def start(self, items: Sequence[ScheduledTokens]) -> _Started:
        """Start the network on scheduled tokens and return the next tokens, which are not known yet."""
        prompts = [item for item in items if item.sequence not in self.seats]
        running = [item.sequence for item in items if item.sequence in self.seats]
        parts = self._read_prompts(prompts) if prompts else []
        return _Started(parts + ([self._step(running)] if running else []))

    def release(self, sequence: EngineSequence) -> None:
        """Free the seat of a sequence. What has been started for it is still computed, but not read."""
        if sequence in self.seats:
            self.free_seats.append(self.seats.pop(sequence))
            del self.num_pages[sequence]

    def _read_prompts(self, items: Sequence[ScheduledTokens]) -> list[Pending]:
        """Read parts of prompts; sequences whose prompt is complete take a seat and get their first token."""
        encode_sources(items, self._encode)
        batch = PackedBatch.from_schedule(items, self.decoder.device)
        hidden = self.decoder.read(batch.tokens, batch.layout, batch.source_layout)
        score_prompts(items, hidden, self.decoder.logits)
        if not batch.sampled:
            return []
        logits = self.decoder.logits(hidden[batch.sampled_rows])
        filtered = [row for row, each in enumerate(batch.sampled) if each.needs_tokens]
        if not filtered:
            return [self._seat(batch.sampled, logits)]
        parts: list[Pending] = [_Filtered([batch.sampled[row] for row in filtered], logits[filtered], self.sampler)]
        if seated := [row for row in range(len(batch.sampled)) if row not in filtered]:
            parts.append(self._seat([batch.sampled[row] for row in seated], logits[seated]))
        return parts

    def _encode(self, sources: Sequence[Sequence[int]], tables: Sequence[PageTable]) -> None:
        """Run the encoder on packed sources, and write the keys and values of cross-attention to their pages."""
        ends = list(accumulate(map(len, sources)))
        for _, group in groupby(range(len(sources)), lambda number: (ends[number] - 1) // _MAX_SOURCE_TOKENS):
            numbers = list(group)
            tokens = upload([token for number in numbers for token in sources[number]], self.decoder.device)
            layout = source_layout([tables[number] for number in numbers], self.decoder.device)
            self.decoder.encode(tokens, layout)

    def _seat(self, sequences: list[EngineSequence], logits: Tensor) -> _Tokens:
        """Give seats to sequences whose prompt has been read, and choose their first tokens from logits (S, V)."""
        seated = [self._take_seat(sequence) for sequence in sequences]
        self.decoder.seats.assign(seated)
        tokens = self.decoder.choose(logits, [each.seat for each in seated])
        return _Tokens(sequences, tokens, _kept_logits(sequences, logits))

    def _take_seat(self, sequence: EngineSequence) -> SeatedSequence:
        """Give a free seat to a sequence, and return the values of the seat's fields."""
        assert sequence.table is not None
        seat = self.free_seats.pop()
        self.seats[sequence], self.num_pages[sequence] = seat, len(sequence.table.pages)
        return SeatedSequence(
            seat=seat,
            num_tokens=sequence.num_tokens,
            pages=sequence.table.page_numbers,
            options=sequence.request.options,
            num_generated=len(sequence.output),
            tokens=sequence.tokens(0, sequence.num_tokens),
            source_pages=[] if sequence.source_table is None else sequence.source_table.page_numbers,
            source_length=len(sequence.request.source),
        )

    def _step(self, sequences: list[EngineSequence]) -> _Tokens:
        """Run the last token of each sequence, which is on the GPU already, and choose the next one."""
        self._send_new_pages(sequences)
        step = self.decoder.launch_step([self.seats[sequence] for sequence in sequences])
        return _Tokens(sequences, AsyncTokens(step.tokens[: len(sequences)]), _kept_logits(sequences, step.logits))

    def _send_new_pages(self, sequences: Sequence[EngineSequence]) -> None:
        """Extend the page tables of seats whose sequence has grown to another page."""
        new: list[tuple[int, int, int]] = []
        for sequence in sequences:
            assert sequence.table is not None
            pages, known = sequence.table.pages, self.num_pages[sequence]
            new += [(self.seats[sequence], number, pages[number]) for number in range(known, len(pages))]
            self.num_pages[sequence] = len(pages)
        if new:
            self.decoder.seats.add_pages(*zip(*new, strict=True))


def _kept_logits(sequences: Sequence[EngineSequence], logits: Tensor) -> dict[EngineSequence, Tensor]:
    """Copy the logits of sequences that ask for log-probabilities, before the next step overwrites them."""
    wanted = [row for row, sequence in enumerate(sequences) if sequence.request.options.logprobs is not None]
    return {sequences[row]: logits[row].float().clone() for row in wanted}
