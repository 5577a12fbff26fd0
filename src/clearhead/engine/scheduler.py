"""Decide which tokens of which sequences the network reads in the next step. It uses no tensors.

    scheduler = Scheduler(pool, max_tokens=256, max_sequences=64)
    scheduler.add(sequence); schedule = scheduler.schedule()

A step reads at most `max_tokens` tokens. Running sequences come first, in the order of their arrival: one token each
while they generate, or the next part of a prompt that does not fit into one step. What is left of the budget goes to
waiting sequences, first come, first served. With max_tokens = 8 and prompts of 5, 6 and 4 tokens:

    step 1    a: prompt[0:5]    b: prompt[0:3]
    step 2    a: 1 token        b: prompt[3:6]    c: prompt[0:4]
    step 3    a: 1 token        b: 1 token        c: 1 token

If the pages run out, the sequence that arrived last is preempted: it gives its pages back and will be computed again
once there is room. The oldest sequence is never preempted for a younger one, so every sequence makes progress.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from clearhead.cache import OutOfPagesError, PageCopy, PagePool, PageTable
from clearhead.engine.sequence import EngineSequence
from clearhead.engine.windows import Windows, first_needed
from clearhead.errors import ClearheadError


class ScheduledTokens(NamedTuple):
    """The tokens from `start` up to `stop` of one sequence, with its draft if it has one."""

    sequence: EngineSequence
    start: int
    stop: int
    is_sampled: bool  # whether the last token of the sequence is among them, so that the next one can be chosen


@dataclass
class Schedule:
    """The work of one step."""

    items: list[ScheduledTokens] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)  # to make before anything is written
    preempted: list[EngineSequence] = field(default_factory=list)


class Scheduler:
    """The waiting and running sequences of an engine, and the pages they share."""

    def __init__(
        self,
        pool: PagePool,
        max_tokens: int,
        max_sequences: int,
        source_pool: PagePool | None = None,
        max_length: int | None = None,
        windows: Windows = (),
    ):
        """Schedule onto the pages of `pool`, and sources onto those of `source_pool`.

        max_length: tokens of the longest sequence and of the longest source; None: as many as the pages hold.
        windows: the windows of all layers, if every layer has one; pages outside of all of them are given back.
        """
        self.windows = windows
        self.pool, self.source_pool, self.max_length = pool, source_pool, max_length
        self.max_tokens, self.max_sequences = max_tokens, max_sequences
        self.waiting: deque[EngineSequence] = deque()
        self.running: list[EngineSequence] = []  # in the order of arrival
        self.num_preemptions = self.num_prompt_tokens = self.num_cached_tokens = 0  # since the engine was created

    @property
    def has_work(self) -> bool:
        """Whether a sequence is waiting or running."""
        return bool(self.waiting or self.running)

    def add(self, sequence: EngineSequence) -> None:
        """Queue a sequence. Raise ClearheadError if it could not run even alone."""
        request = sequence.request
        length = len(request.prompt) + max(sequence.max_new_tokens - 1, 0)  # the last token is never read
        what = f"a prompt of {len(request.prompt)} tokens and {sequence.max_new_tokens} new ones"
        _require_room(self._num_held(length), self.pool.num_tokens, what)
        if self.max_length is not None:
            _require_room(length, self.max_length, what)
        if self.source_pool is not None:
            room = min(self.source_pool.num_tokens, self.max_length or self.source_pool.num_tokens)
            _require_room(len(request.source), room, f"a source of {len(request.source)} tokens")
        sequence.prefix_hashes = self._prefix_hashes(sequence)
        self.waiting.append(sequence)

    def finish(self, sequence: EngineSequence) -> None:
        """Remove a waiting or running sequence and release its pages."""
        if sequence.state == "waiting":
            self.waiting.remove(sequence)
        elif sequence.state == "running":
            self.running.remove(sequence)
        sequence.release()
        sequence.state = "finished"

    # --- one step

    def schedule(self) -> Schedule:
        """Choose the tokens of the next step and allocate their slots."""
        schedule, budget = Schedule(), self.max_tokens
        spare = self.max_tokens - len(self.running)  # for drafts: every running sequence gets a token first
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            if sequence.is_complete or sequence.waits_for_token:
                index += 1
                continue
            count = min(sequence.num_remaining, budget)
            _cut_draft(sequence, min(spare, budget - count) if sequence.num_remaining == 1 else 0)
            if not self._allocate(sequence, count, schedule):
                break
            budget -= count + len(sequence.drafted)
            spare -= len(sequence.drafted)
            index += 1
        if not schedule.preempted:
            self._admit(schedule, budget)
        return schedule

    def _allocate(self, sequence: EngineSequence, count: int, schedule: Schedule) -> bool:
        """Allocate slots for the next `count` tokens of a running sequence and its draft, and schedule them.

        If there is no room, do without the draft, then preempt younger sequences. Return False if the sequence itself
        had to be preempted.
        """
        table, start, num_tokens = sequence.table, sequence.num_computed, sequence.num_tokens
        assert table is not None
        is_sampled = start + count == num_tokens and sequence.max_new_tokens > 0
        while True:
            stop = start + count + len(sequence.drafted)
            try:
                copy = table.append(sequence.tokens(start, stop))
            except OutOfPagesError:
                if sequence.draft is not None:
                    sequence.draft = None
                    continue
                youngest = self.running[-1]
                self._preempt(youngest)
                schedule.preempted.append(youngest)
                if youngest is sequence:
                    return False
                continue
            schedule.copies += [] if copy is None else [copy]
            schedule.items.append(ScheduledTokens(sequence, start, stop, is_sampled))
            return True

    def may_preempt(self) -> bool:
        """Return whether the next step may run out of pages. Waiting sequences never cause that: they wait for room."""
        available = self.pool.num_available
        if available >= len(self.running) + self.pool.num_pages_for(self.max_tokens):
            return False
        return sum(map(self._most_new_pages, self.running)) > available

    def _most_new_pages(self, sequence: EngineSequence) -> int:
        """Return how many pages the next step may allocate for a running sequence."""
        table, drafter = sequence.table, sequence.request.drafter
        assert table is not None
        num_new = min(sequence.num_remaining, self.max_tokens) + (0 if drafter is None else drafter.num_tokens)
        is_shared = bool(table.pages) and self.pool.reference_counts[table.pages[-1]] > 1  # then it is copied
        return self.pool.num_pages_for(table.num_tokens + num_new) - len(table.pages) + is_shared

    def _preempt(self, sequence: EngineSequence) -> None:
        """Return a running sequence to the head of the queue, without its pages."""
        self.running.remove(sequence)
        sequence.release()
        sequence.state = "waiting"
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _admit(self, schedule: Schedule, budget: int) -> None:
        """Start waiting sequences while the tokens of the step, the pages and `max_sequences` allow it."""
        in_progress = (
            {each for sequence in self.running for each in sequence.unpublished_prefix} if self.waiting else set()
        )
        deferred: list[EngineSequence] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_sequences:
            sequence = self.waiting[0]
            if self._waits_for_prefix(sequence, in_progress):
                deferred.append(self.waiting.popleft())
                continue
            if not self._give_pages(sequence):
                break
            self.waiting.popleft()
            self.running.append(sequence)
            in_progress.update(sequence.unpublished_prefix)
            count = min(sequence.num_remaining, budget)
            allocated = self._allocate(sequence, count, schedule)
            assert allocated, "_give_pages has left room for the first tokens"
            budget -= count
        self.waiting.extendleft(reversed(deferred))

    def _give_pages(self, sequence: EngineSequence) -> bool:
        """Give a waiting sequence its page tables, with the pages of a known prefix. Return False if they do not fit.

        There must be room for all of its tokens, and for another page of every running sequence: a sequence that would
        be preempted at once only costs time.
        """
        table = self._create_table(sequence)
        num_held = len(table.pages) - table.num_released
        num_needed = self.pool.num_pages_for(self._num_held(sequence.num_tokens)) - num_held
        if num_needed + len(self.running) > self.pool.num_available:
            table.free()
            return False
        if self.source_pool is not None:
            source_table = PageTable(self.source_pool)
            try:
                source_table.append(sequence.request.source)
            except OutOfPagesError:
                table.free()
                return False
            sequence.source_table, sequence.needs_encoding = source_table, True
        sequence.table, sequence.state = table, "running"
        if sequence.num_cached is None:
            sequence.num_cached = table.num_tokens
            self.num_prompt_tokens += len(sequence.request.prompt)
            self.num_cached_tokens += sequence.num_cached
        return True

    def _create_table(self, sequence: EngineSequence) -> PageTable:
        """Return a page table with the known prefix of a sequence, but without tokens that are still to be scored."""
        tokens = sequence.tokens(0, sequence.num_tokens)
        if sequence.num_scored < sequence.num_to_score:
            tokens = tokens[: sequence.num_scored + 1]
        table = self.pool.create_table(tokens, sequence.salt)
        table.release_before(first_needed(self.windows, table.num_tokens))
        return table

    def _num_held(self, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens a sequence holds at most, in whole pages."""
        if not self.windows:
            return num_tokens
        largest = max(window.size for window in self.windows)
        return min(num_tokens, largest + self.max_tokens + 2 * self.pool.page_size)

    def release_past(self, sequence: EngineSequence, position: int) -> None:
        """Give back the pages that the token at `position` and later ones do not attend to."""
        if self.windows and sequence.table is not None:
            sequence.table.release_before(first_needed(self.windows, position))

    # --- shared prefixes

    def _prefix_hashes(self, sequence: EngineSequence) -> list[bytes]:
        """Return the hashes under which the full pages of a prompt will be published."""
        table, prompt, size = PageTable(self.pool, sequence.salt), sequence.request.prompt, self.pool.page_size
        for end in range(size, len(prompt), size):
            table.hashes.append(table.next_hash(prompt[end - size : end]))
        return table.hashes

    def _waits_for_prefix(self, sequence: EngineSequence, in_progress: set[bytes]) -> bool:
        """Return whether a running sequence is computing the page that this one needs next.

        Waiting for it takes a step or two; computing it again would take as long for every sequence with this prefix.
        """
        if sequence.num_scored < sequence.num_to_score:
            return False  # it computes its prompt itself
        first_missing = next((each for each in sequence.prefix_hashes if each not in self.pool.page_by_hash), None)
        return first_missing is not None and first_missing in in_progress


def _cut_draft(sequence: EngineSequence, count: int) -> None:
    """Keep the first `count` tokens of a draft."""
    if sequence.draft is not None:
        sequence.draft = sequence.draft.cut(count) if min(count, len(sequence.drafted)) > 0 else None


def _require_room(num_tokens: int, capacity: int, what: str) -> None:
    """Raise ClearheadError if a sequence could not run even alone."""
    if num_tokens > capacity:
        raise ClearheadError(
            f"{what} need room for {num_tokens} tokens, but the engine has {capacity}; ask for fewer tokens or give "
            "the engine more memory"
        )
