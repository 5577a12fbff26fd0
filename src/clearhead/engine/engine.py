"""Engine: generate many texts at once. Requests join and leave the batch at every step (continuous batching).

    engine = Engine(network)
    for event in engine.run([Request(prompt=[1, 2, 3], options=SamplingOptions(max_new_tokens=8))]): print(event)

One step:

    scheduler.schedule     which tokens of which sequences; no tensors
    PackedBatch            the same as tensors
    runner.run             the tokens through the network
    sampler.choose         the next token of each sequence
    finish                 events, and the pages of finished sequences

A request gets the same tokens whatever runs beside it. docs/engine.md explains the engine.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from clearhead.architecture import Bidirectional, DynamicScaling, ModelConfig, Rope, remaining_positions
from clearhead.cache import PagePool, PageStorage
from clearhead.engine.batch import PackedBatch
from clearhead.engine.memory import pages_for_memory
from clearhead.engine.request import Event, FinishReason, Request, check_request
from clearhead.engine.runner import Runner
from clearhead.engine.sampler import Choice, Sampler
from clearhead.engine.scheduler import ScheduledTokens, Scheduler
from clearhead.engine.sequence import EngineSequence
from clearhead.errors import ClearheadError, out_of_memory_message
from clearhead.model import Transformer

PAGE_SIZE = 32  # tokens; a shared prefix is found in whole pages, and kernels read a page at a time
MAX_TOKENS, MAX_SEQUENCES = 512, 256  # of one step; larger steps read prompts hardly faster and delay other requests
_NOT_FINITE = (
    "the network's logits are not finite, because its weights are damaged or its dtype is too narrow for them; "
    "load the model in float32"
)


class Engine:
    """A network that generates the texts of many requests in one batch. It is not safe for threads; EngineWorker is."""

    def __init__(
        self,
        network: Transformer,
        *,
        memory: int | None = None,
        max_tokens: int = MAX_TOKENS,
        max_sequences: int = MAX_SEQUENCES,
        page_size: int = PAGE_SIZE,
    ):
        """Allocate the pages.

        memory: bytes for keys and values. None takes a share of the memory that is free.
        max_tokens: tokens that one step reads at most; a longer prompt is read in several steps.
        max_sequences: texts that are generated at the same time; further requests wait.
        page_size: tokens per page.
        """
        if reason := unsupported_by_engine(network.config):
            raise ClearheadError(f"the engine cannot run this model: {reason}")
        if not 1 <= max_sequences <= max_tokens:
            raise ClearheadError(
                f"max_sequences is {max_sequences} and max_tokens {max_tokens}; max_sequences must be at least 1, and "
                "max_tokens at least as large, so that every running text gets a token in every step"
            )
        stack = network.config.output_stack
        parameter = next(network.parameters())
        self.network = network
        num_pages = pages_for_memory(stack, parameter.dtype, parameter.device, page_size, memory)
        pool = PagePool(num_pages, page_size)
        storage = PageStorage.for_stack(stack, pool, parameter.dtype, parameter.device)
        source_storage = None
        if network.config.is_encoder_decoder:
            source_storage = PageStorage(PagePool(num_pages, page_size))
        self.runner = Runner(network, storage, source_storage)
        self.sampler = Sampler(network.config.vocab_size, parameter.device)
        self.scheduler = Scheduler(
            pool, max_tokens, max_sequences, None if source_storage is None else source_storage.pool
        )
        self.sequences: dict[int, EngineSequence] = {}  # unfinished ones
        self._ids = count()
        self._pending: list[Event] = []  # of requests that ended outside of a step

    # --- requests

    def add(self, request: Request) -> int:
        """Queue a request and return its id. Raise ClearheadError if it is invalid or can never fit."""
        check_request(request, self.network.config)
        options = request.options
        limit = remaining_positions(self.network.config.output_stack, len(request.prompt))
        sequence = EngineSequence(next(self._ids), request, min(options.max_new_tokens, limit))
        if sequence.max_new_tokens == 0:
            self._pending.append(Event(sequence.request_id, finish_reason="length"))
            return sequence.request_id
        self.scheduler.add(sequence)
        self.sequences[sequence.request_id] = sequence
        return sequence.request_id

    def abort(self, request_id: int) -> bool:
        """End a request and release its pages. Return False if it is unknown or has finished already."""
        if request_id not in self.sequences:
            return False
        self._pending.append(self._finish(self.sequences[request_id], "aborted"))
        return True

    def abort_all(self, error: str | None = None) -> list[Event]:
        """End all requests, because of an error if one is given, and return their last events."""
        events, self._pending = self._pending, []
        reason: FinishReason = "aborted" if error is None else "error"
        return events + [self._finish(sequence, reason, error=error) for sequence in list(self.sequences.values())]

    @property
    def capacity(self) -> int:
        """Number of tokens that fit into the pages."""
        return self.scheduler.pool.num_pages * self.scheduler.pool.page_size

    def forget_prefixes(self) -> None:
        """Do not use the keys and values of earlier requests for new ones: the weights may have changed."""
        self.scheduler.pool.forget_prefixes()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to report."""
        return self.scheduler.has_work or bool(self._pending)

    def run(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Generate the texts of all requests and yield their events. The n-th request has the n-th smallest id."""
        for request in requests:
            self.add(request)
        while self.has_work:
            yield from self.step()

    # --- one step

    def step(self) -> list[Event]:
        """Read at most `max_tokens` tokens, and return the events of all requests that got a token or ended."""
        events, self._pending = self._pending, []
        schedule = self.scheduler.schedule()
        self.runner.copy_pages(schedule.copies)
        try:
            return events + (self._run(schedule.items) if schedule.items else [])
        except BaseException:  # such as KeyboardInterrupt: the tokens of this step count as not read
            for item in schedule.items:
                if item.sequence.table is not None:
                    item.sequence.table.truncate(item.start)
            raise

    def _run(self, items: Sequence[ScheduledTokens]) -> list[Event]:
        """Run scheduled tokens. If that fails, run each sequence alone, so that only those at fault end."""
        try:
            choices = self._compute(items)
        except Exception as error:
            if len(items) > 1:
                return [event for item in items for event in self._run([item])]
            return [self._finish(items[0].sequence, "error", error=_describe(error))]
        events = [self._record(sequence, choice) for sequence, choice in choices]
        for item in items:
            if item.sequence.table is not None:
                item.sequence.table.publish()
        return events

    def _compute(self, items: Sequence[ScheduledTokens]) -> list[tuple[EngineSequence, Choice]]:
        """Run the network on scheduled tokens and choose the next token of the sequences that are complete."""
        self._encode_sources([item.sequence for item in items if item.sequence.needs_encoding])
        batch = PackedBatch.from_schedule(items, self.network.device)
        logits = self.runner.run(batch)
        if not batch.sampled:
            return []
        return list(zip(batch.sampled, self.sampler.choose(batch.sampled, logits), strict=True))

    def _encode_sources(self, sequences: Sequence[EngineSequence]) -> None:
        """Run the encoder for sequences that have just been admitted."""
        if not sequences:
            return
        tables = [sequence.source_table for sequence in sequences if sequence.source_table is not None]
        self.runner.encode([sequence.request.source for sequence in sequences], tables)
        for sequence in sequences:
            sequence.needs_encoding = False

    def _record(self, sequence: EngineSequence, choice: Choice) -> Event:
        """Add a token to its sequence and return the event."""
        if choice.token is None:
            return self._finish(sequence, "error", error=_NOT_FINITE)
        sequence.append(choice.token)
        if sequence.finish_reason is not None:
            return self._finish(sequence, sequence.finish_reason, choice)
        return Event(sequence.request_id, choice.token, choice.logprobs)

    def _finish(
        self, sequence: EngineSequence, reason: FinishReason, choice: Choice | None = None, error: str | None = None
    ) -> Event:
        """Remove a sequence, publish its pages for later requests, release them, and return its last event."""
        sequence.finish_reason = reason
        if sequence.table is not None and error is None and reason != "aborted":
            sequence.table.publish()
        self.scheduler.finish(sequence)
        del self.sequences[sequence.request_id]
        token, logprobs = (None, None) if choice is None else choice
        return Event(sequence.request_id, token, logprobs, reason, error)


def unsupported_by_engine(config: ModelConfig) -> str | None:
    """Return why the engine cannot run a model, or None if it can."""
    if config.decoder is None or config.head is None:
        return "it has no decoder with a head"
    if any(isinstance(layer.attention.pattern, Bidirectional) for layer in config.decoder.layers):
        return "bidirectional layers cannot be cached"
    positions = [layer.attention.position for layer in config.decoder.layers]
    if any(isinstance(position, Rope) and isinstance(position.scaling, DynamicScaling) for position in positions):
        return "with dynamic scaling, its rotations depend on the length of the whole text"
    return None


def _describe(error: Exception) -> str:
    """Return one sentence for the caller of a request whose computation failed."""
    if isinstance(error, ClearheadError):
        return str(error)
    return out_of_memory_message(error) or f"computing this request failed with {type(error).__name__}: {error}"
