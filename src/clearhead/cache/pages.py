"""The pages of a paged cache: who holds which, which may be shared, and which can be had; no torch.

    pool = PagePool(num_pages=64, page_size=16)
    table = pool.start(prompt); copy = table.append(prompt[table.num_tokens :]); ...; table.publish()

A page has room for the keys and values of `page_size` tokens (Kwon et al. 2023, "PagedAttention"). Every page is

    free      nobody holds it and nothing in it is wanted
    used      held by one sequence, or by several that begin alike
    cached    held by nobody, but full and published: kept for a later sequence that begins alike, until room is needed

This file moves no numbers. It says where they go (`slots`) and which page must first be copied onto which (`PageCopy`).
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from clearhead.errors import ClearheadError

HASH_BYTES = 32  # equal hashes count as equal tokens: nobody may be able to make two prompts collide


class OutOfPagesError(ClearheadError):
    """Too few pages. The tables are as before: free or preempt a sequence and try again."""


class PageCopy(NamedTuple):
    """What `source` holds belongs in `destination` too: copied after all earlier writes and before any later one."""

    source: int
    destination: int


class PagePool:
    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 1 or page_size < 1:
            raise ClearheadError(f"{num_pages} pages of {page_size} tokens; a pool needs at least one of each")
        self.num_pages = num_pages
        self.page_size = page_size
        self.holders = [0] * num_pages  # how many tables hold each page
        self.free = list(reversed(range(num_pages)))
        self.cached: OrderedDict[int, None] = OrderedDict()  # the longest unused first
        self.page_of: dict[bytes, int] = {}  # published pages, by the hash of all tokens up to their end
        self.hash_of: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        return len(self.free) + len(self.cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    # --- holding and letting go

    def require(self, num_pages: int) -> None:
        if num_pages > self.num_available:
            raise OutOfPagesError(
                f"{num_pages} more pages are needed and {self.num_available} of {self.num_pages} can be had; "
                "free a sequence or make the cache larger"
            )

    def allocate(self) -> int:
        """A page with one holder; the longest unused cached one if none is free."""
        self.require(1)
        if self.free:
            page = self.free.pop()
        else:
            page, _ = self.cached.popitem(last=False)
            self.forget(page)
        self.holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One more holder of a used or cached page."""
        self.cached.pop(page, None)
        self.holders[page] += 1

    def release(self, page: int) -> None:
        assert self.holders[page] > 0, f"page {page} has no holder"
        self.holders[page] -= 1
        if self.holders[page] == 0 and page in self.hash_of:
            self.cached[page] = None
        elif self.holders[page] == 0:
            self.free.append(page)

    # --- prefixes

    def start(self, prompt: Sequence[int], salt: bytes = b"") -> "BlockTable":
        """A table that already holds the published pages with which `prompt` begins.

        At least the last token is left to compute, since its logits are wanted. Sequences share pages only under the
        same `salt`: a tenant, an adapter, or whatever else changes keys and values or must not be guessed.
        """
        table = BlockTable(self, salt)
        for end in range(self.page_size, len(prompt), self.page_size):
            tokens = prompt[end - self.page_size : end]
            prefix_hash = table.next_hash(tokens)
            if prefix_hash not in self.page_of:
                break
            page = self.page_of[prefix_hash]
            self.hold(page)
            table.pages.append(page)
            table.tokens += tokens
            table.hashes.append(prefix_hash)
        return table

    def publish(self, page: int, prefix_hash: bytes) -> None:
        """Of several pages with equal contents the first stays the published one."""
        if prefix_hash not in self.page_of:
            self.page_of[prefix_hash] = page
            self.hash_of[page] = prefix_hash

    def forget(self, page: int) -> None:
        """The page is about to be written: what it was published for no longer holds."""
        prefix_hash = self.hash_of.pop(page, None)
        if prefix_hash is not None:
            del self.page_of[prefix_hash]


class BlockTable:
    """The pages of one sequence in order, and the tokens whose keys and values are in them."""

    def __init__(self, pool: PagePool, salt: bytes = b""):
        self.pool = pool
        self.pages: list[int] = []
        self.tokens: list[int] = []
        self.root = hashlib.blake2b(salt, digest_size=HASH_BYTES).digest()
        self.hashes: list[bytes] = []  # of the leading full pages that have been published

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def slots(self, start: int, stop: int) -> list[int]:
        """Where the tokens from `start` up to `stop` stand: page · page_size + place in the page."""
        size = self.pool.page_size
        return [self.pages[token // size] * size + token % size for token in range(start, stop)]

    def append(self, tokens: Sequence[int]) -> PageCopy | None:
        """Room for more tokens, all of them or none. The copy, if any, is made before writing to their slots:

        pages of 4 tokens, forked    a: [7][3]    page 3 has 2 tokens and two holders
                                     b: [7][3]
        b.append([9])                b: [7][5]    PageCopy(source=3, destination=5); a keeps page 3 for itself
        """
        fills_last = len(tokens) > 0 and self.num_tokens % self.pool.page_size > 0
        copies_last = fills_last and self.pool.holders[self.pages[-1]] > 1
        num_new = self.pool.pages_for(self.num_tokens + len(tokens)) - len(self.pages)
        self.pool.require(num_new + copies_last)
        copy = None
        if copies_last:
            copy = PageCopy(self.pages[-1], self.pool.allocate())
            self.pages[-1] = copy.destination
            self.pool.release(copy.source)
        elif fills_last:
            self.pool.forget(self.pages[-1])
        self.pages += [self.pool.allocate() for _ in range(num_new)]
        self.tokens += tokens
        return copy

    def publish(self) -> None:
        """Offer the full pages to later sequences; to be called when their keys and values have been written."""
        size = self.pool.page_size
        for number in range(len(self.hashes), self.num_tokens // size):
            self.hashes.append(self.next_hash(self.tokens[number * size : (number + 1) * size]))
            self.pool.publish(self.pages[number], self.hashes[-1])

    def fork(self) -> "BlockTable":
        """A second sequence that begins with all of this one; a page is copied when one of them writes into it."""
        twin = BlockTable(self.pool)
        twin.root, twin.pages, twin.tokens, twin.hashes = self.root, [*self.pages], [*self.tokens], [*self.hashes]
        for page in twin.pages:
            self.pool.hold(page)
        return twin

    def truncate(self, num_tokens: int) -> None:
        """Keep the first tokens only; the last page goes first, so that eviction takes a prefix from its end."""
        assert 0 <= num_tokens <= self.num_tokens, f"{num_tokens} of {self.num_tokens} tokens"
        while len(self.pages) > self.pool.pages_for(num_tokens):
            self.pool.release(self.pages.pop())
        del self.tokens[num_tokens:]
        del self.hashes[num_tokens // self.pool.page_size :]

    def free(self) -> None:
        self.truncate(0)

    def next_hash(self, tokens: Sequence[int]) -> bytes:
        """The hash of everything up to the end of a page with these tokens that follows the published ones."""
        parent = self.hashes[-1] if self.hashes else self.root
        content = b"".join(token.to_bytes(8, "little") for token in tokens)
        return hashlib.blake2b(parent + content, digest_size=HASH_BYTES).digest()
