"""Allocate the pages of a paged cache, share them between sequences, and evict them. It uses no tensors.

    pool = PagePool(num_pages=64, page_size=16)
    table = pool.create_table(prompt); copy = table.append(prompt[table.num_tokens :]); ...; table.publish()

A page has `page_size` slots, one for the keys and values of each token (Kwon et al. 2023, "PagedAttention", where a
page is called a block). Every page is in one of three states:

    free      no table holds it, and its contents are not needed
    used      held by one sequence, or by several with a common prefix
    cached    held by no table, but full and published: kept until evicted, for later sequences with the same prefix

This module moves no keys or values. It returns where they belong (`slots`) and which page must be copied (`PageCopy`).
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from clearhead.errors import ClearheadError

RELEASED = -1  # stands in a table for a page that it has given back
_HASH_BYTES = 32  # equal hashes count as equal tokens, so nobody may be able to construct two prompts that collide


class OutOfPagesError(ClearheadError):
    """There are too few pages. The tables are unchanged: free or preempt a sequence and try again."""


class PageCopy(NamedTuple):
    """Copy the contents of page `source` to page `destination`, after all earlier writes and before any later one."""

    source: int
    destination: int


class PagePool:
    """A fixed number of pages that page tables share. A page is reused once no table holds it."""

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 1 or page_size < 1:
            raise ClearheadError(f"num_pages is {num_pages} and page_size {page_size}; both must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self.reference_counts = [0] * num_pages  # number of tables that hold each page
        self.free = list(reversed(range(num_pages)))
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.page_by_hash: dict[bytes, int] = {}  # published pages, by the hash of all tokens up to their end
        self.hash_by_page: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """Number of pages that can be allocated: free and cached ones."""
        return len(self.free) + len(self.cached)

    @property
    def num_used(self) -> int:
        """Number of pages that tables hold."""
        return self.num_pages - self.num_available

    @property
    def num_tokens(self) -> int:
        """Number of tokens that all pages hold."""
        return self.num_pages * self.page_size

    def num_pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that `num_tokens` tokens fill, the last one perhaps partly."""
        return -(-num_tokens // self.page_size)

    # --- allocation and reference counts

    def require_pages(self, num_pages: int) -> None:
        """Raise OutOfPagesError if fewer than `num_pages` pages can be allocated."""
        if num_pages > self.num_available:
            raise OutOfPagesError(
                f"{num_pages} more pages are needed, but only {self.num_available} of {self.num_pages} are available; "
                "free a sequence or create a larger pool"
            )

    def allocate(self) -> int:
        """Return a free page, or evict the least recently used cached page. Its reference count becomes 1."""
        self.require_pages(1)
        if self.free:
            page = self.free.pop()
        else:
            page, _ = self.cached.popitem(last=False)
            self.unpublish(page)
        self.reference_counts[page] = 1
        return page

    def acquire(self, page: int) -> None:
        """Add a reference to a used or cached page."""
        self.cached.pop(page, None)
        self.reference_counts[page] += 1

    def release(self, page: int) -> None:
        """Remove a reference. Without references a published page becomes cached, any other page free."""
        assert self.reference_counts[page] > 0, f"page {page} has no references"
        self.reference_counts[page] -= 1
        if self.reference_counts[page] == 0 and page in self.hash_by_page:
            self.cached[page] = None
        elif self.reference_counts[page] == 0:
            self.free.append(page)

    # --- shared prefixes

    def create_table(self, prompt: Sequence[int], salt: bytes = b"") -> "PageTable":
        """Return a table that already holds the published pages of the longest known prefix of `prompt`.

        The last token of the prompt is never among them, because its logits must be computed. Sequences share pages
        only if they have the same `salt`: use one per tenant or adapter, or for anything else that changes keys and
        values or must not be guessed.
        """
        table = PageTable(self, salt)
        for end in range(self.page_size, len(prompt), self.page_size):
            tokens = prompt[end - self.page_size : end]
            prefix_hash = table.next_hash(tokens)
            if prefix_hash not in self.page_by_hash:
                break
            page = self.page_by_hash[prefix_hash]
            self.acquire(page)
            table.pages.append(page)
            table.tokens += tokens
            table.hashes.append(prefix_hash)
        return table

    def publish(self, page: int, prefix_hash: bytes) -> None:
        """Make a full page available to later sequences. Of several equal pages, the first one stays published."""
        if prefix_hash not in self.page_by_hash:
            self.page_by_hash[prefix_hash] = page
            self.hash_by_page[page] = prefix_hash

    def forget_prefixes(self) -> None:
        """Free all cached pages and withdraw the others, because the weights of the network may have changed."""
        self.free += reversed(self.cached)
        self.cached.clear()
        self.page_by_hash.clear()
        self.hash_by_page.clear()

    def unpublish(self, page: int) -> None:
        """Withdraw a page whose contents are about to be overwritten."""
        prefix_hash = self.hash_by_page.pop(page, None)
        if prefix_hash is not None:
            del self.page_by_hash[prefix_hash]


class PageTable:
    """The pages of one sequence in order, and the tokens whose keys and values they hold (vLLM's block table)."""

    def __init__(self, pool: PagePool, salt: bytes = b""):
        self.pool = pool
        self.pages: list[int] = []
        self.tokens: list[int] = []
        self.root_hash = hashlib.blake2b(salt, digest_size=_HASH_BYTES).digest()
        self.num_released = 0  # leading pages that were given back
        self.hashes: list[bytes] = []  # prefix hashes of the leading full pages that have been published

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the table."""
        return len(self.tokens)

    def slots(self, start: int, stop: int) -> list[int]:
        """Return the slots of the tokens from `start` up to `stop`: page · page_size + offset in the page."""
        size = self.pool.page_size
        return [self.pages[token // size] * size + token % size for token in range(start, stop)]

    def append(self, tokens: Sequence[int]) -> PageCopy | None:
        """Allocate slots for more tokens, for all of them or for none.

        If the last page is shared, it is replaced by a copy (copy-on-write). Make the returned copy before writing to
        the new slots:

        two tables after a fork, pages of 4 tokens    a: [7][3]    page 3 has 2 tokens and 2 references
                                                      b: [7][3]
        b.append([9])                                 b: [7][5]    PageCopy(source=3, destination=5); only a has page 3
        """
        pool, fills_last = self.pool, len(self.tokens) % self.pool.page_size > 0
        if fills_last and len(tokens) == 1:  # a running sequence, for which this is called at every step
            last = self.pages[-1]
            if pool.reference_counts[last] == 1 and last not in pool.hash_by_page:
                self.tokens += tokens
                return None
        fills_last = fills_last and len(tokens) > 0
        copies_last = fills_last and self.pool.reference_counts[self.pages[-1]] > 1
        num_new = self.pool.num_pages_for(self.num_tokens + len(tokens)) - len(self.pages)
        self.pool.require_pages(num_new + copies_last)
        copy = None
        if copies_last:
            copy = PageCopy(self.pages[-1], self.pool.allocate())
            self.pages[-1] = copy.destination
            self.pool.release(copy.source)
        elif fills_last:
            self.pool.unpublish(self.pages[-1])
        self.pages += [self.pool.allocate() for _ in range(num_new)]
        self.tokens += tokens
        return copy

    def publish(self, num_tokens: int | None = None) -> None:
        """Make the full pages of the first `num_tokens` tokens, or of all, available to later sequences.

        Call this once their keys and values are written.
        """
        size = self.pool.page_size
        for number in range(len(self.hashes), (self.num_tokens if num_tokens is None else num_tokens) // size):
            self.hashes.append(self.next_hash(self.tokens[number * size : (number + 1) * size]))
            if self.pages[number] != RELEASED:
                self.pool.publish(self.pages[number], self.hashes[-1])

    def fork(self) -> "PageTable":
        """Return a second table with the same tokens. A shared page is copied when one of the two writes to it."""
        other = PageTable(self.pool)
        other.root_hash = self.root_hash
        other.pages = [*self.pages]
        other.tokens = [*self.tokens]
        other.hashes = [*self.hashes]
        other.num_released = self.num_released
        for page in other.pages:
            if page != RELEASED:
                self.pool.acquire(page)
        return other

    def release_before(self, token: int) -> None:
        """Give back the pages whose tokens all come before `token`, because no layer attends to them any more."""
        for number in range(self.num_released, token // self.pool.page_size):
            self.pool.release(self.pages[number])
            self.pages[number] = RELEASED
        self.num_released = max(self.num_released, token // self.pool.page_size)

    @property
    def page_numbers(self) -> list[int]:
        """The pages in order. The last one stands for those that were given back, which nobody reads."""
        if self.num_released == 0:
            return self.pages
        return [self.pages[-1] if page == RELEASED else page for page in self.pages]

    def truncate(self, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens.

        The last page is released first, so that cached prefixes are evicted from their end.
        """
        assert 0 <= num_tokens <= self.num_tokens, f"{num_tokens} of {self.num_tokens} tokens"
        while len(self.pages) > self.pool.num_pages_for(num_tokens):
            page = self.pages.pop()
            if page != RELEASED:
                self.pool.release(page)
        self.num_released = min(self.num_released, len(self.pages))
        del self.tokens[num_tokens:]
        del self.hashes[num_tokens // self.pool.page_size :]

    def free(self) -> None:
        """Release all pages."""
        self.truncate(0)

    def next_hash(self, tokens: Sequence[int]) -> bytes:
        """Return the prefix hash of a page with these tokens that follows the published pages."""
        parent = self.hashes[-1] if self.hashes else self.root_hash
        content = b"".join(token.to_bytes(8, "little") for token in tokens)
        return hashlib.blake2b(parent + content, digest_size=_HASH_BYTES).digest()
