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

from clearhead.cache import BlockTable, ContiguousStore, KeyValueCache, PagedCache, PagePool, PageStorage
from clearhead.generation import prefill
from clearhead.model import EncoderOutput
from clearhead.verification.finding import Comparison, Pair, Skipped
from clearhead.verification.subject import Subject, lengths_of

STEPS = 32  # tokens read one by one after the others
ASTRAY = 5  # tokens read that are not of the text
UNEVEN = (13, 1, 1, 17, 2, 1, 24)  # pieces a text arrives in: single, few, more than a ring takes in place
PAGE_SIZE = 16


def token_by_token(subject: Subject) -> Comparison:
    """A text read and then continued, and a short one from its first token on."""
    steps = min(STEPS, len(subject.rows[0]) // 2)
    start = len(subject.rows[0]) - steps
    last = len(subject.rows) - 1
    continued = read(subject, fresh(subject), subject.tokens(), cross_keys_values(subject), [start] + [1] * steps)
    from_nothing = read(subject, fresh(subject), subject.tokens(last), cross_keys_values(subject, last), [1])
    pairs = [(continued, subject.expected[0]), (from_nothing, subject.expected[last])]
    return Comparison(pairs, f"{steps} tokens one by one after {start}")


def chunked_prefill(subject: Subject) -> Comparison:
    """One row, at all its tokens; and rows of different lengths as the decode loop reads them, at their last."""
    sizes, pairs = (5, 16, 40), []
    for size in sizes:
        whole = read(subject, fresh(subject), subject.tokens(), cross_keys_values(subject), [size])
        pairs.append((whole, subject.expected[0]))
        rows = [list(row) for row in subject.rows]
        last = prefill(subject.network, rows, fresh(subject), cross_keys_values(subject, None), chunk=size)
        pairs += [(last[row], alone[0, -1]) for row, alone in enumerate(subject.expected)]
    return Comparison(pairs, f"pieces of {', '.join(map(str, sizes))} tokens")


def contiguous(subject: Subject) -> Comparison:
    """Also where a layer needs only a window: then the mask alone has to forget."""
    num_layers = len(subject.config.output_stack.layers)
    cache = fresh(subject, stores=[ContiguousStore() for _ in range(num_layers)])
    found = read(subject, cache, subject.tokens(), cross_keys_values(subject))
    return Comparison([(found, subject.expected[0])], f"{len(subject.rows[0])} tokens in uneven pieces")


def sliding(subject: Subject) -> Comparison:
    if subject.config.decoder is None or subject.window is None:
        raise Skipped("no layer has a window")
    length = len(subject.rows[0])
    if subject.window >= length:
        raise Skipped(f"{length} tokens do not pass the window of {subject.window}; --length makes them more")
    steps = min(2 * STEPS, length // 2)  # they pass the end of a chunk, where the most must still be there
    arrivals = ((0, [length - steps] + [1] * steps), (0, UNEVEN), (16, UNEVEN))
    pairs = [
        (
            read(subject, fresh(subject, slack=slack), subject.tokens(), cross_keys_values(subject), sizes),
            subject.expected[0],
        )
        for slack, sizes in arrivals
    ]
    return Comparison(pairs, f"{length} tokens through windows of up to {subject.window}")


def paged(subject: Subject) -> Comparison:
    """Rows of different lengths, a fork of the first on its way, and the first anew on the pages it left behind."""
    need_past(subject)
    pool = PagePool(sum(len(row) // PAGE_SIZE + 4 for row in subject.rows), PAGE_SIZE)
    room, encoder_output = PageStorage(pool), cross_keys_values(subject, None)
    cache = PagedCache(room, [pool.start(row) for row in subject.rows])
    cuts = [(0, len(row) // 3, len(row) // 3 + 1, len(row)) for row in subject.rows]
    pairs = []
    for step in range(3):
        spans = [slice(cut[step], cut[step + 1]) for cut in cuts]
        tokens, mask = subject.padded([row[span] for row, span in zip(subject.rows, spans, strict=True)], "left")
        logits = subject.run(tokens, mask, encoder_output, cache=cache)
        cache.advance()
        pairs += [(logits[row][mask[row]], subject.expected[row][0, span]) for row, span in enumerate(spans)]
        if step == 1:
            pairs.append(forked_pages(subject, room, cache.tables[0]))
    anew = pool.start(subject.rows[0])
    shared = anew.num_tokens
    found = read(subject, PagedCache(room, [anew]), subject.tokens()[:, shared:], cross_keys_values(subject))
    pairs.append((found, subject.expected[0][:, shared:]))
    return Comparison(pairs, f"pages of {PAGE_SIZE} tokens, {shared} tokens shared")


def forked_pages(subject: Subject, room: PageStorage, table: BlockTable) -> Pair:
    """A copy of the first row goes another way, which its original must not notice."""
    past = torch.tensor([table.tokens], device=subject.device)
    stray = strange(subject, past[:, :ASTRAY])
    fork = table.fork()
    turned = read(subject, PagedCache(room, [fork]), stray, cross_keys_values(subject))
    fork.free()
    alone = subject.run(torch.cat((past, stray), dim=1), encoder_output=subject.encoder_output())
    return turned, alone[:, -ASTRAY:]


def forked(subject: Subject) -> Comparison:
    """The copy reads another text; both then stand where they would have stood alone."""
    encoder_output = cross_keys_values(subject)
    prompt, rest, cache = started(subject)
    stray, start = strange(subject, rest), prompt.shape[1]
    turned = read(subject, cache.fork(), stray, encoder_output)
    kept = read(subject, cache, rest, encoder_output)
    alone = subject.run(torch.cat((prompt, stray), dim=1), encoder_output=subject.encoder_output())
    pairs = [(turned, alone[:, start:]), (kept, subject.expected[0][:, start:])]
    return Comparison(pairs, f"two ways on after {start} tokens")


def truncated(subject: Subject) -> Comparison:
    """Twice, so that what was read in between is gone as well."""
    encoder_output = cross_keys_values(subject)
    prompt, rest, cache = started(subject)
    for _ in range(2):
        read(subject, cache, strange(subject, rest)[:, :ASTRAY], encoder_output)
        cache.truncate(prompt.shape[1])
    found = read(subject, cache, rest, encoder_output)
    return Comparison([(found, subject.expected[0][:, prompt.shape[1] :])], f"{ASTRAY} tokens taken back, twice")


def reloaded(subject: Subject) -> Comparison:
    prompt, rest, cache = started(subject)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        cache.save(path)
        num_bytes = path.stat().st_size
        again = KeyValueCache.load(path, subject.config, subject.device)
    found = read(subject, again, rest, cross_keys_values(subject))
    return Comparison([(found, subject.expected[0][:, prompt.shape[1] :])], f"{num_bytes:,} bytes on disk")


def selected(subject: Subject) -> Comparison:
    """Rows of a padded batch taken out, put in another order and doubled, as when some of them end."""
    starts = [row[:-ASTRAY] for row in subject.rows]
    cache, encoder_output, order = fresh(subject), cross_keys_values(subject, None), [2, 0, 0]
    prefill(subject.network, starts, cache, encoder_output)
    places = torch.tensor(order, device=subject.device)
    ends = torch.tensor([subject.rows[row][-ASTRAY:] for row in order], device=subject.device)
    found = read(subject, cache.select(places), ends, None if encoder_output is None else encoder_output.select(places))
    pairs = [(found[place], subject.expected[row][0, -ASTRAY:]) for place, row in enumerate(order)]
    return Comparison(pairs, f"rows 2, 0, 0 of {lengths_of(starts)} tokens")


# --- how a cache is fed


def need_past(subject: Subject) -> None:
    if subject.config.decoder is None:
        raise Skipped("an encoder alone keeps no past")


def fresh(subject: Subject, **options: Any) -> KeyValueCache:
    need_past(subject)
    return KeyValueCache(subject.config, **options)


def cross_keys_values(subject: Subject, row: int | None = 0) -> EncoderOutput | None:
    """What the decode loop has of one source, or of all; None without an encoder."""
    encoder_output = subject.encoder_output(row)
    return None if encoder_output is None else subject.network.precompute_cross_attention(encoder_output)


def started(subject: Subject) -> tuple[Tensor, Tensor, KeyValueCache]:
    """Two thirds of the first row, the last third, and a cache that has read the first two."""
    tokens, cache = subject.tokens(), fresh(subject)
    start = 2 * tokens.shape[1] // 3
    read(subject, cache, tokens[:, :start], cross_keys_values(subject))
    return tokens[:, :start], tokens[:, start:], cache


def read(
    subject: Subject,
    cache: KeyValueCache | PagedCache,
    tokens: Tensor,
    encoder_output: EncoderOutput | None,
    sizes: Sequence[int] = UNEVEN,
) -> Tensor:
    """Logits of the next tokens, read in pieces of these sizes, over and over; the cache moves on."""
    logits = []
    for piece in tokens.split(list(pieces(tokens.shape[1], sizes)), dim=1):
        single = piece.shape[1] == 1  # as in the decode loop
        logits.append(subject.run(piece, encoder_output=encoder_output, cache=cache, absorb=single))
        cache.advance()
    return torch.cat(logits, dim=1)


def pieces(length: int, sizes: Sequence[int]) -> Iterator[int]:
    for size in cycle(sizes):
        yield min(size, length)
        length -= size
        if length <= 0:
            return


def strange(subject: Subject, tokens: Tensor) -> Tensor:
    """Other tokens, none of them the same."""
    return (tokens + 1) % subject.config.vocab_size
