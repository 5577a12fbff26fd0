"""The page pool against a simulated storage: after any order of calls, every sequence reads back its own contents.

A slot of the storage holds what keys and values depend on: the salt and all tokens up to and including its own.
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
    """Return the prefix hash of full pages, computed independently of the pool."""
    digest = hashlib.blake2b(salt, digest_size=32).digest()
    for start in range(0, len(tokens), page_size):
        digest = hashlib.blake2b(digest, digest_size=32)
        for token in tokens[start : start + page_size]:
            digest.update(token.to_bytes(8, "little"))
        digest = digest.digest()
    return digest


class Sequence:
    """A page table, and separately what it should contain."""

    def __init__(self, table: PageTable, salt: bytes, tokens: list[int]):
        self.table, self.salt, self.tokens = table, salt, tokens

    def content(self, index: int) -> tuple[bytes, tuple[int, ...]]:
        """Return what the slot of this token should contain."""
        return self.salt, tuple(self.tokens[: index + 1])


# Prompts that often share a prefix, and steps small enough to leave pages partly filled.
prompts = st.builds(
    lambda text, length: text[:length], st.sampled_from([[0] * 12, [0, 0, 0, 1] * 3]), st.integers(0, 12)
)
few_tokens = st.lists(st.integers(0, 1), max_size=3)
salts = st.sampled_from([b"", b"tenant"])


class PagePoolMachine(RuleBasedStateMachine):
    """Call the pool in random order. Copies and writes are queued, in the order of the calls, until `publish`."""

    sequences = Bundle("sequences")

    @initialize(num_pages=st.integers(3, 30), page_size=st.integers(1, 4))
    def create_pool(self, num_pages, page_size):
        self.pool = PagePool(num_pages, page_size)
        self.storage = {}
        self.queue = []
        self.alive = []

    def flush(self):
        """Carry out the queued copies and writes."""
        size = self.pool.page_size
        for item in self.queue:
            if isinstance(item, PageCopy):
                for offset in range(size):
                    content = self.storage.get(item.source * size + offset)
                    self.storage[item.destination * size + offset] = content
            else:
                slot, content = item
                self.storage[slot] = content
        self.queue.clear()

    def snapshot(self):
        """Return everything the pool keeps."""
        pool = self.pool
        return [*pool.reference_counts], sorted(pool.free), list(pool.cached), dict(pool.page_by_hash)

    def extend(self, sequence, tokens):
        """Append tokens. If the pool is full, check that nothing has changed."""
        table, size = sequence.table, self.pool.page_size
        before = self.snapshot(), [*table.pages], [*table.tokens]
        num_pages_after = -(-(len(sequence.tokens) + len(tokens)) // size)
        shared = bool(tokens) and len(sequence.tokens) % size > 0 and self.references()[table.pages[-1]] > 1
        num_needed = num_pages_after - len(table.pages) + shared
        try:
            copy = table.append(tokens)
        except OutOfPagesError:
            assert num_needed > len(self.pool.free) + len(self.pool.cached)
            assert before == (self.snapshot(), table.pages, table.tokens)
            return
        assert (copy is not None) == shared
        start = len(sequence.tokens)
        sequence.tokens += tokens
        self.queue += [copy] if copy else []
        slots = table.slots(start, start + len(tokens))
        self.queue += [(slot, sequence.content(start + number)) for number, slot in enumerate(slots)]

    @rule(target=sequences, prompt=prompts, salt=salts)
    def create_table(self, prompt, salt):
        table = self.pool.create_table(prompt, salt)
        assert table.tokens == prompt[: table.num_tokens]
        assert table.num_tokens % self.pool.page_size == 0
        assert table.num_tokens == 0 or table.num_tokens < len(prompt)
        sequence = Sequence(table, salt, prompt[: table.num_tokens])
        self.alive.append(sequence)
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
        forked = Sequence(sequence.table.fork(), sequence.salt, [*sequence.tokens])
        self.alive.append(forked)
        return forked

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
        self.alive.remove(sequence)

    @rule()
    def write(self):
        self.flush()

    def references(self):
        """Count the tables that hold each page."""
        return Counter(page for sequence in self.alive for page in sequence.table.pages)

    @invariant()
    def every_page_is_free_used_or_cached_and_references_are_counted(self):
        references = self.references()
        assert self.pool.reference_counts == [references[page] for page in range(self.pool.num_pages)]
        assert sorted([*self.pool.free, *self.pool.cached, *references]) == list(range(self.pool.num_pages))
        assert self.pool.num_used == len(references)
        assert self.pool.num_available == self.pool.num_pages - len(references)

    @invariant()
    def every_sequence_reads_back_its_contents(self):
        storage, queue = dict(self.storage), [*self.queue]
        self.flush()
        for sequence in self.alive:
            assert sequence.table.tokens == sequence.tokens
            assert len(sequence.table.pages) == -(-len(sequence.tokens) // self.pool.page_size)
            for index, slot in enumerate(sequence.table.slots(0, len(sequence.tokens))):
                assert self.storage[slot] == sequence.content(index)
        self.storage, self.queue = storage, queue

    @invariant()
    def published_pages_contain_what_they_are_published_for(self):
        size = self.pool.page_size
        assert {page: key for key, page in self.pool.page_by_hash.items()} == self.pool.hash_by_page
        assert set(self.pool.cached) <= set(self.pool.hash_by_page)
        for page, key in self.pool.hash_by_page.items():
            salt, tokens = self.storage[page * size + size - 1]
            assert key == chained_hash(salt, tokens, size)
            for offset in range(size):
                expected = salt, tokens[: len(tokens) - size + offset + 1]
                assert self.storage[page * size + offset] == expected

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for sequence in self.alive:
            sequence.table.free()
        assert self.pool.num_used == 0
        pages = {self.pool.allocate() for _ in range(self.pool.num_pages)}
        assert pages == set(range(self.pool.num_pages))
        assert not self.pool.page_by_hash
        assert not self.pool.hash_by_page
        with pytest.raises(OutOfPagesError):
            self.pool.allocate()


TestPagePool = PagePoolMachine.TestCase
TestPagePool.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


# --- examples


def publish_sequence(pool: PagePool, tokens: list[int], salt: bytes = b"") -> PageTable:
    """Return the published table of a sequence."""
    table = pool.create_table(tokens, salt)
    table.append(tokens[table.num_tokens :])
    table.publish()
    return table


def test_a_fork_copies_the_shared_page_when_it_writes():
    pool = PagePool(num_pages=4, page_size=4)
    first = publish_sequence(pool, [1, 2, 3, 4, 5, 6])
    second = first.fork()
    assert second.pages == first.pages
    assert pool.num_used == 2
    full, partial = first.pages
    copy = second.append([7])
    assert copy == PageCopy(source=partial, destination=second.pages[1])
    assert first.pages == [full, partial]
    assert second.pages[0] == full
    assert first.append([8]) is None  # it now holds its page alone
    assert second.slots(4, 7) == [copy.destination * 4 + offset for offset in range(3)]


def test_a_full_shared_page_needs_no_copy():
    pool = PagePool(num_pages=3, page_size=2)
    first = publish_sequence(pool, [1, 2])
    second = first.fork()
    assert second.append([3]) is None
    assert first.append([4]) is None
    assert first.pages[0] == second.pages[0]
    assert first.pages[1] != second.pages[1]


def test_a_table_reuses_a_prefix_without_the_last_token():
    pool = PagePool(num_pages=8, page_size=2)
    pages = publish_sequence(pool, [1, 2, 3, 4, 5]).pages
    assert pool.create_table([1, 2, 3, 4, 5]).pages == pages[:2]
    assert pool.create_table([1, 2, 3, 4]).pages == pages[:1]
    assert pool.create_table([1, 2, 3]).pages == pages[:1]
    assert pool.create_table([1, 2]).pages == []
    assert pool.create_table([3, 4, 5]).pages == []
    assert pool.create_table([1, 9, 3, 4, 5]).pages == []


def test_a_prefix_is_shared_only_after_publishing_and_with_the_same_salt():
    pool = PagePool(num_pages=8, page_size=2)
    table = pool.create_table([1, 2, 3], salt=b"alice")
    table.append([1, 2, 3])
    assert pool.create_table([1, 2, 3], salt=b"alice").num_tokens == 0
    table.publish()
    assert pool.create_table([1, 2, 3], salt=b"alice").num_tokens == 2
    assert pool.create_table([1, 2, 3], salt=b"bob").num_tokens == 0
    assert pool.create_table([1, 2, 3]).num_tokens == 0


def test_freed_prefixes_are_evicted_least_recently_used_first():
    pool = PagePool(num_pages=4, page_size=1)
    old, recent = publish_sequence(pool, [1, 2]), publish_sequence(pool, [3, 4])
    old.free()
    recent.free()
    assert (pool.num_used, pool.num_available, len(pool.cached)) == (0, 4, 4)
    pool.create_table([1, 2, 0]).free()  # used again, so now the most recently used
    other = pool.create_table([9])
    other.append([9])
    assert pool.create_table([3, 4, 0]).num_tokens == 1  # its last page was evicted, its first one was not
    assert pool.create_table([1, 2, 0]).num_tokens == 2


def test_appending_without_enough_pages_raises_and_changes_nothing():
    pool = PagePool(num_pages=3, page_size=2)
    first = publish_sequence(pool, [1, 2, 3])
    second = first.fork()
    with pytest.raises(
        OutOfPagesError, match="2 more pages are needed, but only 1 of 3 are available; free a sequence"
    ):
        second.append([4, 5])
    assert second.pages == first.pages
    assert second.tokens == [1, 2, 3]
    assert issubclass(OutOfPagesError, ClearheadError)
    first.free()
    assert second.append([4, 5]) is None
    assert pool.num_available == 0


def test_writing_to_a_truncated_published_page_that_others_hold_copies_it():
    pool = PagePool(num_pages=4, page_size=4)
    table = publish_sequence(pool, [1, 2, 3, 4, 5])
    table.truncate(2)
    assert pool.create_table([1, 2, 3, 4, 0]).num_tokens == 4  # nothing has been overwritten yet
    pool.create_table([1, 2, 3, 4, 0]).free()
    other = pool.create_table([1, 2, 3, 4, 0])
    assert table.append([7, 8]) is not None  # another table holds the page by now
    other.free()


def test_writing_to_an_unshared_published_page_unpublishes_it():
    pool = PagePool(num_pages=4, page_size=4)
    table = publish_sequence(pool, [1, 2, 3, 4, 5])
    page = table.pages[0]
    table.truncate(2)
    assert table.append([7, 8]) is None
    assert table.pages == [page]
    assert pool.create_table([1, 2, 3, 4, 0]).num_tokens == 0
    table.publish()
    assert pool.create_table([1, 2, 7, 8, 0]).pages == [page]


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (4, 0), (-1, 1)])
def test_a_pool_without_pages_or_slots_is_rejected(num_pages, page_size):
    with pytest.raises(ClearheadError, match="both must be at least 1"):
        PagePool(num_pages, page_size)
