"""Checks of what is kept between steps: whatever happened to a cache, what follows is as if all were read anew.

compared = token_by_token(subject); compared.difference
"""

from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from clearhead.cache.cache import KeyValueCache
from clearhead.cache.stores import ContiguousStore
from clearhead.generation.decode import prefill
from clearhead.model.transformer import Memory
from clearhead.verification.finding import Comparison, Skipped
from clearhead.verification.reading import lengths_of
from clearhead.verification.subject import Subject

STEPS = 32  # tokens read one by one after the others
ASTRAY = 5  # tokens read that are not of the text


def token_by_token(subject: Subject) -> Comparison:
    """A text read and then continued, and a short one from its first token on."""
    steps = min(STEPS, len(subject.rows[0]) // 2)
    shortest = len(subject.rows) - 1
    pairs = [
        (through(subject, fresh(subject), [len(subject.rows[0]) - steps] + [1] * steps), subject.expected[0]),
        (through(subject, fresh(subject), [1] * len(subject.rows[-1]), shortest), subject.expected[-1]),
    ]
    return Comparison(pairs, f"{steps} tokens one by one after {len(subject.rows[0]) - steps}")


def chunked_prefill(subject: Subject) -> Comparison:
    """In pieces of one size, alone; and as the decode loop reads prompts of different lengths."""
    sizes, length = (5, 16, 40), len(subject.rows[0])
    pairs = [(through(subject, fresh(subject), pieces(length, [size])), subject.expected[0]) for size in sizes]
    rows = [list(row) for row in subject.rows]
    for size in sizes:
        last = prefill(subject.network, rows, fresh(subject), remembered(subject, None), chunk=size)
        pairs += [(last[row], whole[0, -1]) for row, whole in enumerate(subject.expected)]
    return Comparison(pairs, f"pieces of {', '.join(map(str, sizes))} tokens")


def contiguous(subject: Subject) -> Comparison:
    """Also where a layer needs only a window: then the mask alone has to forget."""
    num_layers = len(subject.config.output_stack.layers)
    cache = fresh(subject, stores=[ContiguousStore() for _ in range(num_layers)])
    return Comparison([unevenly(subject, cache)], f"{len(subject.rows[0])} tokens in uneven pieces")


def sliding(subject: Subject) -> Comparison:
    if subject.config.decoder is None or subject.window is None:
        raise Skipped("no layer has a window")
    length = len(subject.rows[0])
    if subject.window >= length:
        raise Skipped(f"{length} tokens do not pass the window of {subject.window}; --length makes them more")
    pairs = [unevenly(subject, fresh(subject, slack=slack)) for slack in (0, 16)]
    return Comparison(pairs, f"{length} tokens through windows of up to {subject.window}")


def forked(subject: Subject) -> Comparison:
    """The copy reads another text; both then stand where they would have stood alone."""
    prompt, rest = halves(subject)
    cache = fresh(subject)
    read(subject, cache, prompt)
    other = cache.fork()
    stray = strange(subject, rest)
    turned = read(subject, other, stray)
    kept = read(subject, cache, rest)
    start = prompt.shape[1]
    alone = subject.run(torch.cat((prompt, stray), dim=1), memory=subject.memory())
    return Comparison(
        [(turned, alone[:, start:]), (kept, subject.expected[0][:, start:])], f"two ways on after {start} tokens"
    )


def truncated(subject: Subject) -> Comparison:
    """Twice, so that what was read in between is gone as well."""
    prompt, rest = halves(subject)
    cache = fresh(subject)
    read(subject, cache, prompt)
    for _ in range(2):
        read(subject, cache, strange(subject, rest)[:, :ASTRAY])
        cache.truncate(prompt.shape[1])
    found = read(subject, cache, rest)
    return Comparison([(found, subject.expected[0][:, prompt.shape[1] :])], f"{ASTRAY} tokens taken back, twice")


def reloaded(subject: Subject) -> Comparison:
    prompt, rest = halves(subject)
    cache = fresh(subject)
    read(subject, cache, prompt)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        cache.save(path)
        num_bytes = path.stat().st_size
        again = KeyValueCache.load(path, subject.config, subject.device)
    found = read(subject, again, rest)
    return Comparison([(found, subject.expected[0][:, prompt.shape[1] :])], f"{num_bytes:,} bytes on disk")


def selected(subject: Subject) -> Comparison:
    """Rows of a padded batch taken out, put in another order and doubled, as when some of them end."""
    rows = [list(row) for row in subject.rows]
    starts = [row[: max(len(row) - ASTRAY, 1)] for row in rows]
    cache, memory = fresh(subject), remembered(subject, None)
    prefill(subject.network, starts, cache, memory)
    order = torch.tensor([2, 0, 2], device=subject.device)
    ends = torch.tensor([rows[row][-ASTRAY:] for row in order.tolist()], device=subject.device)
    found = read(subject, cache.select(order), ends, None if memory is None else memory.select(order))
    pairs = [(found[place], subject.expected[row][0, -ASTRAY:]) for place, row in enumerate(order.tolist())]
    return Comparison(pairs, f"rows 2, 0, 2 of prompts of {lengths_of(starts)} tokens")


# --- how a cache is fed


def fresh(subject: Subject, **options: Any) -> KeyValueCache:
    if subject.config.decoder is None:
        raise Skipped("an encoder alone keeps no past")
    return KeyValueCache(subject.config, **options)


def remembered(subject: Subject, row: int | None = 0) -> Memory | None:
    memory = subject.memory(row)
    return None if memory is None else subject.network.remember(memory)


def read(subject: Subject, cache: KeyValueCache, tokens: Tensor, memory: Memory | None = None) -> Tensor:
    """Logits of the next tokens; the cache moves on. The memory, where there is one, is of the first source."""
    logits = subject.run(tokens, memory=memory or remembered(subject), cache=cache)
    cache.advance()
    return logits


def through(subject: Subject, cache: KeyValueCache, sizes: list[int], row: int = 0) -> Tensor:
    """Logits of a whole row, read in pieces of these sizes; single tokens as the decode loop does."""
    logits, memory = [], remembered(subject, row)
    for piece in subject.tokens(row).split(sizes, dim=1):
        logits.append(subject.run(piece, memory=memory, cache=cache, absorb=piece.shape[1] == 1))
        cache.advance()
    return torch.cat(logits, dim=1)


def unevenly(subject: Subject, cache: KeyValueCache) -> tuple[Tensor, Tensor]:
    return through(subject, cache, pieces(len(subject.rows[0]), (13, 1, 1, 17, 2, 1, 24))), subject.expected[0]


def pieces(length: int, sizes: Sequence[int]) -> list[int]:
    """These sizes again and again until they fill the length."""
    return list(fill(length, sizes))


def fill(length: int, sizes: Sequence[int]) -> Iterator[int]:
    for size in cycle(sizes):
        if length <= size:
            yield length
            return
        yield size
        length -= size


def halves(subject: Subject) -> tuple[Tensor, Tensor]:
    """The first row up to its last third, and that third."""
    tokens = subject.tokens()
    start = 2 * tokens.shape[1] // 3
    return tokens[:, :start], tokens[:, start:]


def strange(subject: Subject, tokens: Tensor) -> Tensor:
    """Other tokens, none of them the same."""
    return (tokens + 1) % subject.config.vocab_size
