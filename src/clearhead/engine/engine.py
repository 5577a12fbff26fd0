"""Engine: generate many texts at once. Requests join and leave the batch at every step (continuous batching).

    engine = Engine(network)
    for event in engine.run([Request(prompt=[1, 2, 3], options=SamplingOptions(max_new_tokens=8))]): print(event)

One step:

    scheduler.schedule    which tokens of which sequences; no tensors
    executor.start        the tokens through the network, and the next token of each sequence
    collect               events, and the pages of finished sequences

On a GPU, a step is scheduled and started before the tokens of the one before it are collected, so that the GPU does not
wait for Python. A request gets the same tokens whatever runs beside it. docs/engine.md explains the engine.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TypedDict

from clearhead.architecture import remaining_positions
from clearhead.cache import PagePool
from clearhead.engine.drafting import draft_tokens, settle_drafts
from clearhead.engine.executor import Pending
from clearhead.engine.executors import build_executor, is_deterministic_by_default, unsupported_by_engine
from clearhead.engine.memory import pages_for_memory
from clearhead.engine.parallel_runner import Channel, LostProcessError
from clearhead.engine.reports import NOT_FINITE, advance_filter, describe_error, prompt_report
from clearhead.engine.request import Event, FinishReason, Request, check_request
from clearhead.engine.sampler import Choice
from clearhead.engine.scheduler import ScheduledTokens, Scheduler
from clearhead.engine.sequence import EngineSequence
from clearhead.engine.statistics import EngineStatistics
from clearhead.engine.windows import windows_of
from clearhead.errors import ClearheadError
from clearhead.model import Transformer

PAGE_SIZE = 32  # tokens; a shared prefix is found in whole pages, and kernels read a page at a time
MAX_SEQUENCES = 256
_MAX_TOKENS = {"cpu": 256, "cuda": 8192}  # per step; more are hardly faster and delay other requests


@dataclass(frozen=True)
class _Step:
    """A step that has been started and is not collected yet."""

    items: Sequence[ScheduledTokens]
    pending: Pending


class EngineSettings(TypedDict, total=False):
    """The settings of an engine.

    memory: bytes for keys and values. None takes a share of the free memory.
    max_tokens: maximum number of tokens that one step reads; a longer prompt is read in several steps. None: 256 on a
    CPU, 8192 on a GPU.
    max_sequences: maximum number of texts that are generated at the same time; further requests wait.
    page_size: tokens per page.
    deterministic: the tokens and log-probabilities of a request are the same to the last bit, whatever runs beside it.
    None: where that costs nothing, which is in the CPU kernels. True: always; elsewhere every token then passes through
    the network alone, which is slow.
    channel: sends every step to the other processes, which hold shards of the same network; None: there are none.
    """

    memory: int | None
    max_tokens: int | None
    max_sequences: int
    page_size: int
    deterministic: bool | None
    channel: Channel | None


class Engine:
    """A network that generates the texts of many requests in one batch. It is not safe for threads; EngineWorker is."""

    def __init__(
        self,
        network: Transformer,
        *,
        memory: int | None = None,
        max_tokens: int | None = None,
        max_sequences: int = MAX_SEQUENCES,
        page_size: int = PAGE_SIZE,
        deterministic: bool | None = None,
        channel: Channel | None = None,
    ):
        """Allocate the pages. EngineSettings explains the arguments."""
        if reason := unsupported_by_engine(network.config):
            raise ClearheadError(f"the engine cannot run this model: {reason}")
        parameter, stack = next(network.parameters()), network.config.output_stack
        if max_tokens is None:
            max_tokens = max(_MAX_TOKENS.get(parameter.device.type, _MAX_TOKENS["cpu"]), max_sequences)
        if not 1 <= max_sequences <= max_tokens:
            raise ClearheadError(
                f"max_sequences is {max_sequences} and max_tokens {max_tokens}; max_sequences must be at least 1, and "
                "max_tokens at least as large, so that every running text gets a token in every step"
            )
        num_pages = pages_for_memory(stack, parameter.dtype, parameter.device, page_size, memory)
        pool = PagePool(num_pages, page_size)
        source_pool = PagePool(num_pages, page_size) if network.config.is_encoder_decoder else None
        self.network = network
        self.deterministic = is_deterministic_by_default(network, page_size) if deterministic is None else deterministic
        self.executor = build_executor(network, pool, source_pool, max_sequences, self.deterministic, channel)
        self.scheduler = Scheduler(
            pool, max_tokens, max_sequences, source_pool, self.executor.max_length, windows_of(stack)
        )
        self.sequences: dict[int, EngineSequence] = {}  # unfinished ones
        self.num_generated_tokens = self.num_drafted_tokens = self.num_accepted_tokens = 0
        self._ids = count()
        self._reports: list[Event] = []  # events of requests that ended outside of a step
        self._started: list[_Step] = []  # not collected yet

    # --- requests

    def add(self, request: Request) -> int:
        """Queue a request and return its id. Raise ClearheadError if it is invalid or can never fit."""
        check_request(request, self.network.config)
        request = replace(request, options=request.options.with_seed())
        limit = remaining_positions(self.network.config.output_stack, len(request.prompt))
        sequence = EngineSequence(next(self._ids), request, min(request.options.max_new_tokens, limit))
        if sequence.max_new_tokens == 0 and request.prompt_logprobs is None:
            self._reports.append(Event(sequence.request_id, finish_reason="length"))
            return sequence.request_id
        self.scheduler.add(sequence)
        self.sequences[sequence.request_id] = sequence
        return sequence.request_id

    def abort(self, request_id: int) -> bool:
        """End a request and release its pages. Return False if it is unknown or has finished already."""
        if request_id not in self.sequences:
            return False
        self._reports.append(self._finish(self.sequences[request_id], "aborted"))
        return True

    def abort_all(self, error: str | None = None) -> list[Event]:
        """End all requests, because of an error if one is given, and return their last events."""
        events, self._reports = self._reports, []
        reason: FinishReason = "aborted" if error is None else "error"
        return events + [self._finish(sequence, reason, error=error) for sequence in list(self.sequences.values())]

    @property
    def is_idle(self) -> bool:
        """Whether no request is waiting or running. A step of requests that have ended may still be uncollected."""
        return not self.sequences

    @property
    def capacity(self) -> int:
        """Number of tokens that fit into the pages."""
        return self.scheduler.pool.num_tokens

    @property
    def statistics(self) -> EngineStatistics:
        """How busy the engine is. Other threads may read it at any time."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return EngineStatistics(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_pages=pool.num_pages,
            num_used_pages=pool.num_used,
            num_cached_pages=len(pool.cached),
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_drafted_tokens=self.num_drafted_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
        )

    def forget_prefixes(self) -> None:
        """Do not use the keys and values of earlier requests for new ones: the weights may have changed."""
        self.scheduler.pool.forget_prefixes()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to report."""
        return self.scheduler.has_work or bool(self._reports or self._started)

    def run(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Generate the texts of all requests and yield their events. The n-th request has the n-th smallest id."""
        for request in requests:
            self.add(request)
        while self.has_work:
            yield from self.step()

    # --- one step

    def step(self) -> list[Event]:
        """Read at most `max_tokens` tokens, and return the events of all requests that got a token or ended."""
        if self._started and self.scheduler.may_preempt():
            self._reports += self._collect()  # only a sequence whose tokens are all known can be preempted
        for sequence, error in draft_tokens(self.scheduler.running):
            self._reports.append(self._finish(sequence, "error", error=error))
        schedule = self.scheduler.schedule()
        for sequence in schedule.preempted:
            self.executor.release(sequence)
        self.executor.copy_pages(schedule.copies)
        before, self._started = self._started, []
        try:
            started = self._start(schedule.items) if schedule.items else []
        except BaseException:  # such as KeyboardInterrupt: the tokens of this step count as not read
            self._started = before
            self._reports += self._collect()
            self._roll_back(schedule.items)
            raise
        self._started = before
        self._reports += self._collect()
        self._started = started
        if not self.executor.is_asynchronous:
            self._reports += self._collect()
        events, self._reports = self._reports, []
        return events

    def _start(self, items: Sequence[ScheduledTokens]) -> list[_Step]:
        """Start scheduled tokens. If that fails, start each sequence alone, so that only those at fault end."""
        try:
            step = _Step(items, self.executor.start(items))
        except Exception as error:
            if isinstance(error, LostProcessError):
                raise
            if len(items) > 1:
                return [step for item in items for step in self._start([item])]
            self._reports.append(self._finish(items[0].sequence, "error", error=describe_error(error)))
            return []
        for item in items:
            item.sequence.num_pending += item.is_sampled
        return [step]

    def _collect(self) -> list[Event]:
        """Wait for the steps that have been started, and return their events."""
        events: list[Event] = []
        page_size = self.scheduler.pool.page_size
        steps, self._started = self._started, []
        for step in steps:
            try:
                choices = step.pending.result()
            except Exception as error:
                running = [item.sequence for item in step.items if item.sequence.state == "running"]
                events += [self._finish(sequence, "error", error=describe_error(error)) for sequence in running]
                continue
            num_drafted, num_accepted = settle_drafts(step.items, choices)
            self.num_drafted_tokens += num_drafted
            self.num_accepted_tokens += num_accepted
            # A sequence may have ended after this step was started; its token is then dropped.
            events += [self._record(*choice) for choice in choices if choice[0].state == "running"]
            for item in step.items:
                if item.sequence.table is not None and item.stop // page_size > item.start // page_size:
                    num_read = min(item.stop, item.sequence.num_computed)
                    item.sequence.table.publish(min(num_read, item.sequence.num_known))
                    self.scheduler.release_past(item.sequence, num_read)
                is_read = item.sequence.state == "running" and item.stop == item.sequence.num_tokens
                if is_read and item.sequence.max_new_tokens == 0:  # the prompt was only scored
                    events.append(self._finish(item.sequence, "length", Choice(None, None)))
        return events

    def _roll_back(self, items: Sequence[ScheduledTokens]) -> None:
        """Undo the scheduling of tokens that the network has not read, or may not have read."""
        for item in items:
            sequence = item.sequence
            if sequence.table is not None:
                sequence.table.truncate(min(item.start, sequence.num_known - 1))
            sequence.num_pending, sequence.draft = 0, None
            self.executor.release(sequence)

    def _record(self, sequence: EngineSequence, choice: Choice) -> Event:
        """Add a token to its sequence and return the event."""
        if choice.token is None:
            return self._finish(sequence, "error", error=choice.error or NOT_FINITE)
        sequence.append(choice.token)
        self.num_generated_tokens += 1
        if sequence.finish_reason is not None:
            return self._finish(sequence, sequence.finish_reason, choice)
        if error := advance_filter(sequence, choice.token):
            return self._finish(sequence, "error", error=error)
        return Event(sequence.request_id, choice.token, choice.logprobs, prompt=prompt_report(sequence))

    def _finish(
        self, sequence: EngineSequence, reason: FinishReason, choice: Choice | None = None, error: str | None = None
    ) -> Event:
        """Remove a sequence, release its pages and return its last event. Its full pages stay for later requests."""
        sequence.finish_reason = reason
        report = None if choice is None else prompt_report(sequence)
        if choice is not None and sequence.table is not None:
            sequence.table.publish(min(sequence.table.num_tokens, sequence.num_known))
        self.scheduler.finish(sequence)
        self.executor.release(sequence)
        del self.sequences[sequence.request_id]
        token, logprobs = (None, None) if choice is None else choice[:2]
        return Event(sequence.request_id, token, logprobs, reason, error, report)
