"""The page allocator against a simulated memory: whatever is called in whatever order, every sequence reads back right.

A slot of the memory holds what its keys and values depend on: the salt and all tokens up to and with its own.
"""

import hashlib
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from clearhead.cache.page_pool import OutOfPagesError, PageCopy, PagePool, PageTable
from clearhead.errors import ClearheadError


def chained_hash(salt: bytes, tokens: tuple[int, ...], page_size: int) -> bytes:
    digest = hashlib.blake2b(salt, digest_size=32).digest()
    for start in range(0, len(tokens), page_size):
        digest = hashlib.blake2b(digest, digest_size=32)
        for token in tokens[start : start + page_size]:
            digest.update(token.to_bytes(8, "little"))
        digest = digest.digest()
    return digest


class Sequence:
    """A table and, kept apart from it, what it should hold."""

    def __init__(self, table: PageTable, salt: bytes, tokens: list[int]):
        self.table, self.salt, self.tokens = table, salt, tokens

    def content(self, index: int) -> tuple[bytes, tuple[int, ...]]:
        return self.salt, tuple(self.tokens[: index + 1])


# Texts that often begin alike, and steps small enough to leave pages partly filled.
prompts = st.builds(
    lambda text, length: text[:length], st.sampled_from([[0] * 12, [0, 0, 0, 1] * 3]), st.integers(0, 12)
)
few_tokens = st.lists(st.integers(0, 1), max_size=3)
salts = st.sampled_from([b"", b"tenant"])


class PagedMemory(RuleBasedStateMachine):
    """Copies and writes wait in a queue, in the order of the calls; publishing alone needs them done."""

    sequences = Bundle("sequences")

    @initialize(num_pages=st.integers(3, 30), page_size=st.integers(1, 4))
    def begin(self, num_pages, page_size):
        self.pool = PagePool(num_pages, page_size)
        self.memory = {}
        self.queue = []
        self.living = []

    def flush(self):
        size = self.pool.page_size
        for item in self.queue:
            if isinstance(item, PageCopy):
                for place in range(size):
                    content = self.memory.get(item.source * size + place)
                    self.memory[item.destination * size + place] = content
            else:
                slot, content = item
                self.memory[slot] = content
        self.queue.clear()

    def counted(self):
        pool = self.pool
        return [*pool.holders], sorted(pool.free), list(pool.cached), dict(pool.page_of)

    def extend(self, sequence, tokens):
        """Whether there was room; if not, nothing may have changed."""
        table, size = sequence.table, self.pool.page_size
        before = self.counted(), [*table.pages], [*table.tokens]
        num_pages_after = -(-(len(sequence.tokens) + len(tokens)) // size)
        shared = bool(tokens) and len(sequence.tokens) % size > 0 and self.holders()[table.pages[-1]] > 1
        num_needed = num_pages_after - len(table.pages) + shared
        try:
            copy = table.append(tokens)
        except OutOfPagesError:
            assert num_needed > len(self.pool.free) + len(self.pool.cached)
            assert before == (self.counted(), table.pages, table.tokens)
            return False
        assert (copy is not None) == shared
        start = len(sequence.tokens)
        sequence.tokens += tokens
        self.queue += [copy] if copy else []
        slots = table.slots(start, start + len(tokens))
        self.queue += [(slot, sequence.content(start + number)) for number, slot in enumerate(slots)]
        return True

    @rule(target=sequences, prompt=prompts, salt=salts)
    def start(self, prompt, salt):
        table = self.pool.create_table(prompt, salt)
        assert table.tokens == prompt[: table.num_tokens]
        assert table.num_tokens % self.pool.page_size == 0
        assert table.num_tokens == 0 or table.num_tokens < len(prompt)
        sequence = Sequence(table, salt, prompt[: table.num_tokens])
        self.living.append(sequence)
        self.extend(sequence, prompt[table.num_tokens :])
        return sequence

    @rule(sequence=sequences, tokens=few_tokens)
    def append(self, sequence, tokens):
        self.extend(sequence, tokens)

    @rule(sequence=sequences, tokens=few_tokens)
    def step(self, sequence, tokens):
        self.extend(sequence, tokens)
        self.publish(sequence)

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence):
        twin = Sequence(sequence.table.fork(), sequence.salt, [*sequence.tokens])
        self.living.append(twin)
        return twin

    @rule(sequence=sequences, num_dropped=st.integers(0, 8))
    def truncate(self, sequence, num_dropped):
        num_kept = max(0, len(sequence.tokens) - num_dropped)
        sequence.table.truncate(num_kept)
        del sequence.tokens[num_kept:]

    @rule(sequence=sequences)
    def publish(self, sequence):
        self.flush()
        sequence.table.publish()

    @rule(sequence=consumes(sequences))
    def free(self, sequence):
        sequence.table.free()
        assert sequence.table.pages == []
        self.living.remove(sequence)

    @rule()
    def write(self):
        self.flush()

    def holders(self):
        return Counter(page for sequence in self.living for page in sequence.table.pages)

    @invariant()
    def every_page_is_free_used_or_cached_and_holders_are_counted(self):
        held = self.holders()
        assert self.pool.holders == [held[page] for page in range(self.pool.num_pages)]
        assert sorted([*self.pool.free, *self.pool.cached, *held]) == list(range(self.pool.num_pages))
        assert self.pool.num_used == len(held)
        assert self.pool.num_available == self.pool.num_pages - len(held)

    @invariant()
    def every_sequence_reads_back_right(self):
        self.check_contents()

    def check_contents(self):
        memory, queue = dict(self.memory), [*self.queue]
        self.flush()
        for sequence in self.living:
            assert sequence.table.tokens == sequence.tokens
            assert len(sequence.table.pages) == -(-len(sequence.tokens) // self.pool.page_size)
            for index, slot in enumerate(sequence.table.slots(0, len(sequence.tokens))):
                assert self.memory[slot] == sequence.content(index)
        self.memory, self.queue = memory, queue

    @invariant()
    def published_pages_hold_what_they_are_published_for(self):
        size = self.pool.page_size
        assert {page: key for key, page in self.pool.page_of.items()} == self.pool.hash_of
        assert set(self.pool.cached) <= set(self.pool.hash_of)
        for page, key in self.pool.hash_of.items():
            salt, tokens = self.memory[page * size + size - 1]
            assert key == chained_hash(salt, tokens, size)
            for place in range(size):
                expected = salt, tokens[: len(tokens) - size + place + 1]
                assert self.memory[page * size + place] == expected

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for sequence in self.living:
            sequence.table.free()
        assert self.pool.num_used == 0
        pages = {self.pool.allocate() for _ in range(self.pool.num_pages)}
        assert pages == set(range(self.pool.num_pages))
        assert not self.pool.page_of
        assert not self.pool.hash_of
        with pytest.raises(OutOfPagesError):
            self.pool.allocate()


TestPagedMemory = PagedMemory.TestCase
TestPagedMemory.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


# --- examples


def written(pool: PagePool, tokens: list[int], salt: bytes = b"") -> PageTable:
    table = pool.create_table(tokens, salt)
    table.append(tokens[table.num_tokens :])
    table.publish()
    return table


def test_a_fork_copies_the_shared_page_when_it_writes():
    pool = PagePool(num_pages=4, page_size=4)
    first = written(pool, [1, 2, 3, 4, 5, 6])
    second = first.fork()
    assert second.pages == first.pages
    assert pool.num_used == 2
    full, partly = first.pages
    copy = second.append([7])
    assert copy == PageCopy(source=partly, destination=second.pages[1])
    assert first.pages == [full, partly]
    assert second.pages[0] == full
    assert first.append([8]) is None  # alone on its page now
    assert second.slots(4, 7) == [copy.destination * 4 + place for place in range(3)]


def test_a_full_shared_page_needs_no_copy():
    pool = PagePool(num_pages=3, page_size=2)
    first = written(pool, [1, 2])
    second = first.fork()
    assert second.append([3]) is None
    assert first.append([4]) is None
    assert first.pages[0] == second.pages[0]
    assert first.pages[1] != second.pages[1]


def test_a_prefix_is_found_again_and_the_last_token_is_left_to_compute():
    pool = PagePool(num_pages=8, page_size=2)
    pages = written(pool, [1, 2, 3, 4, 5]).pages
    assert pool.create_table([1, 2, 3, 4, 5]).pages == pages[:2]
    assert pool.create_table([1, 2, 3, 4]).pages == pages[:1]
    assert pool.create_table([1, 2, 3]).pages == pages[:1]
    assert pool.create_table([1, 2]).pages == []
    assert pool.create_table([3, 4, 5]).pages == []
    assert pool.create_table([1, 9, 3, 4, 5]).pages == []


def test_a_prefix_is_found_only_after_it_was_published_and_under_its_salt():
    pool = PagePool(num_pages=8, page_size=2)
    table = pool.create_table([1, 2, 3], salt=b"alice")
    table.append([1, 2, 3])
    assert pool.create_table([1, 2, 3], salt=b"alice").num_tokens == 0
    table.publish()
    assert pool.create_table([1, 2, 3], salt=b"alice").num_tokens == 2
    assert pool.create_table([1, 2, 3], salt=b"bob").num_tokens == 0
    assert pool.create_table([1, 2, 3]).num_tokens == 0


def test_freed_prefixes_stay_until_room_is_needed_and_the_longest_unused_goes_first():
    pool = PagePool(num_pages=4, page_size=1)
    old, recent = written(pool, [1, 2]), written(pool, [3, 4])
    old.free()
    recent.free()
    assert (pool.num_used, pool.num_available, len(pool.cached)) == (0, 4, 4)
    pool.create_table([1, 2, 0]).free()  # used again, hence the most recent now
    other = pool.create_table([9])
    other.append([9])
    assert pool.create_table([3, 4, 0]).num_tokens == 1  # its end was evicted, its beginning not
    assert pool.create_table([1, 2, 0]).num_tokens == 2


def test_too_few_pages_change_nothing_and_say_so():
    pool = PagePool(num_pages=3, page_size=2)
    first = written(pool, [1, 2, 3])
    second = first.fork()
    with pytest.raises(OutOfPagesError, match="2 more pages are needed and 1 of 3 can be had; free a sequence"):
        second.append([4, 5])
    assert second.pages == first.pages
    assert second.tokens == [1, 2, 3]
    assert issubclass(OutOfPagesError, ClearheadError)
    first.free()
    assert second.append([4, 5]) is None
    assert pool.num_available == 0


def test_truncating_into_a_published_page_and_writing_withdraws_it():
    pool = PagePool(num_pages=4, page_size=4)
    table = written(pool, [1, 2, 3, 4, 5])
    table.truncate(2)
    assert pool.create_table([1, 2, 3, 4, 0]).num_tokens == 4  # nothing was overwritten so far
    pool.create_table([1, 2, 3, 4, 0]).free()
    other = pool.create_table([1, 2, 3, 4, 0])
    assert table.append([7, 8]) is not None  # others hold the page by now
    other.free()


def test_an_unshared_page_is_written_in_place_and_no_longer_found():
    pool = PagePool(num_pages=4, page_size=4)
    table = written(pool, [1, 2, 3, 4, 5])
    page = table.pages[0]
    table.truncate(2)
    assert table.append([7, 8]) is None
    assert table.pages == [page]
    assert pool.create_table([1, 2, 3, 4, 0]).num_tokens == 0
    table.publish()
    assert pool.create_table([1, 2, 7, 8, 0]).pages == [page]


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (4, 0), (-1, 1)])
def test_an_empty_pool_is_refused(num_pages, page_size):
    with pytest.raises(ClearheadError, match="a pool needs at least one of each"):
        PagePool(num_pages, page_size)
