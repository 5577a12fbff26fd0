"""Checks of key-value caches: however a cache was filled or changed, later logits equal those of a full forward pass.

comparison = token_by_token(case); comparison.difference
"""

from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from clearhead.cache import (
    ContiguousStore,
    KeyValueCache,
    PagedCache,
    PagePool,
    PageStorage,
    PageTable,
    forward_step,
)
from clearhead.generation import prefill
from clearhead.model import EncoderOutput
from clearhead.verification.case import VerificationCase, list_lengths
from clearhead.verification.results import CheckSkipped, LogitComparison, LogitPair

_MAX_STEPS = 32  # tokens read one by one
_NUM_OTHER_TOKENS = 5  # tokens read that do not belong to the text
_UNEVEN_CHUNKS = (13, 1, 1, 17, 2, 1, 24)  # single tokens, a few, and more than a sliding-window cache can add in place
_PREFILL_CHUNKS = (5, 16, 40)
_PAGE_SIZE = 16


def token_by_token(case: VerificationCase) -> LogitComparison:
    """Check a text continued token by token, and a short one read token by token from the start."""
    num_steps = min(_MAX_STEPS, len(case.sequences[0]) // 2)
    start = len(case.sequences[0]) - num_steps
    last = len(case.sequences) - 1
    chunks = [start] + [1] * num_steps
    continued = _read_chunks(case, _new_cache(case), case.tokens(), cross_attention(case), chunks)
    from_start = _read_chunks(case, _new_cache(case), case.tokens(last), cross_attention(case, last), [1])
    pairs = [(continued, case.expected[0]), (from_start, case.expected[last])]
    return LogitComparison(pairs, f"{num_steps} single tokens after the first {start}")


def chunked_prefill(case: VerificationCase) -> LogitComparison:
    """Check one sequence at all its tokens, and a batch of different lengths, as decoding prefills it, at the last."""
    pairs = []
    for size in _PREFILL_CHUNKS:
        logits = _read_chunks(case, _new_cache(case), case.tokens(), cross_attention(case), [size])
        pairs.append((logits, case.expected[0]))
        prompts = [list(sequence) for sequence in case.sequences]
        last_logits = prefill(case.network, prompts, _new_cache(case), cross_attention(case, None), chunk=size)
        pairs += [(last_logits[index], expected[0, -1]) for index, expected in enumerate(case.expected)]
    return LogitComparison(pairs, f"chunks of {', '.join(map(str, _PREFILL_CHUNKS))} tokens")


def contiguous_cache(case: VerificationCase) -> LogitComparison:
    """Check contiguous stores in every layer; in layers with a window, only the mask excludes earlier tokens then."""
    num_layers = len(case.config.output_stack.layers)
    cache = _new_cache(case, stores=[ContiguousStore() for _ in range(num_layers)])
    logits = _read_chunks(case, cache, case.tokens(), cross_attention(case))
    return LogitComparison([(logits, case.expected[0])], f"{len(case.sequences[0])} tokens in uneven chunks")


def sliding_window_cache(case: VerificationCase) -> LogitComparison:
    """Check stores that keep only a window of tokens, with a text that is longer than the window."""
    if case.config.decoder is None or case.window is None:
        raise CheckSkipped("no layer has a sliding window")
    length = len(case.sequences[0])
    if case.window >= length:
        raise CheckSkipped(f"{length} tokens do not exceed the window of {case.window}; increase --length")
    num_steps = min(
        2 * _MAX_STEPS, length // 2
    )  # beyond the end of a chunk, where a chunked layer needs the most tokens
    single_tokens = [length - num_steps] + [1] * num_steps
    pairs = [
        (
            _read_chunks(case, _new_cache(case, slack=slack), case.tokens(), cross_attention(case), chunks),
            case.expected[0],
        )
        for slack, chunks in ((0, single_tokens), (0, _UNEVEN_CHUNKS), (16, _UNEVEN_CHUNKS))
    ]
    return LogitComparison(pairs, f"{length} tokens, windows of up to {case.window}")


def paged_cache(case: VerificationCase) -> LogitComparison:
    """Check sequences of different lengths, a fork of the first, and the first one again on pages it shares."""
    require_decoder(case)
    pool = PagePool(sum(len(sequence) // _PAGE_SIZE + 4 for sequence in case.sequences), _PAGE_SIZE)
    storage, encoder_output = PageStorage(pool), cross_attention(case, None)
    cache = PagedCache(storage, [pool.create_table(sequence) for sequence in case.sequences])
    cuts = [(0, len(sequence) // 3, len(sequence) // 3 + 1, len(sequence)) for sequence in case.sequences]
    pairs = []
    for step in range(3):
        spans = [slice(cut[step], cut[step + 1]) for cut in cuts]
        tokens, mask = case.pad([ids[span] for ids, span in zip(case.sequences, spans, strict=True)], "left")
        logits = forward_step(case.network, tokens, cache, mask, encoder_output, absorb=False, last_only=False)
        pairs += [(logits[i][mask[i]], case.expected[i][0, span]) for i, span in enumerate(spans)]
        if step == 1:
            pairs.append(_forked_pages(case, storage, cache.tables[0]))
    table = pool.create_table(case.sequences[0])
    num_shared = table.num_tokens
    new_tokens = case.tokens()[:, num_shared:]
    logits = _read_chunks(case, PagedCache(storage, [table]), new_tokens, cross_attention(case))
    pairs.append((logits, case.expected[0][:, num_shared:]))
    return LogitComparison(pairs, f"pages of {_PAGE_SIZE} tokens, {num_shared} tokens shared")


def _forked_pages(case: VerificationCase, storage: PageStorage, table: PageTable) -> LogitPair:
    """Continue a fork of a page table with other tokens, which must not change the original."""
    past = torch.tensor([table.tokens], device=case.device)
    other = other_tokens(case, past[:, :_NUM_OTHER_TOKENS])
    fork = table.fork()
    logits = _read_chunks(case, PagedCache(storage, [fork]), other, cross_attention(case))
    fork.free()
    expected = case.compute_logits(torch.cat((past, other), dim=1), encoder_output=case.encoder_output())
    return logits, expected[:, -_NUM_OTHER_TOKENS:]


def forked_cache(case: VerificationCase) -> LogitComparison:
    """Check that a fork and its original can be continued with different texts."""
    encoder_output = cross_attention(case)
    prompt, rest, cache = _start_cache(case)
    other, start = other_tokens(case, rest), prompt.shape[1]
    fork_logits = _read_chunks(case, cache.fork(), other, encoder_output)
    original_logits = _read_chunks(case, cache, rest, encoder_output)
    expected = case.compute_logits(torch.cat((prompt, other), dim=1), encoder_output=case.encoder_output())
    pairs = [(fork_logits, expected[:, start:]), (original_logits, case.expected[0][:, start:])]
    return LogitComparison(pairs, f"two continuations of {start} tokens")


def truncated_cache(case: VerificationCase) -> LogitComparison:
    """Read other tokens and remove them, twice, so that they are overwritten too; then continue the text."""
    encoder_output = cross_attention(case)
    prompt, rest, cache = _start_cache(case)
    for _ in range(2):
        _read_chunks(case, cache, other_tokens(case, rest)[:, :_NUM_OTHER_TOKENS], encoder_output)
        cache.truncate(prompt.shape[1])
    logits = _read_chunks(case, cache, rest, encoder_output)
    expected = case.expected[0][:, prompt.shape[1] :]
    return LogitComparison([(logits, expected)], f"{_NUM_OTHER_TOKENS} tokens removed, twice")


def saved_cache(case: VerificationCase) -> LogitComparison:
    """Save a cache to a file, load it and continue the text."""
    prompt, rest, cache = _start_cache(case)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        cache.save(path)
        num_bytes = path.stat().st_size
        loaded = KeyValueCache.load(path, case.config, case.device)
    logits = _read_chunks(case, loaded, rest, cross_attention(case))
    return LogitComparison([(logits, case.expected[0][:, prompt.shape[1] :])], f"{num_bytes:,} bytes on disk")


def reordered_cache(case: VerificationCase) -> LogitComparison:
    """Select, reorder and repeat sequences of a padded batch, as decoding does when some of them end."""
    prompts = [sequence[:-_NUM_OTHER_TOKENS] for sequence in case.sequences]
    cache, encoder_output, order = _new_cache(case), cross_attention(case, None), [2, 0, 0]
    prefill(case.network, prompts, cache, encoder_output)
    indices = torch.tensor(order, device=case.device)
    rest = torch.tensor([case.sequences[index][-_NUM_OTHER_TOKENS:] for index in order], device=case.device)
    selected_output = None if encoder_output is None else encoder_output.select(indices)
    logits = _read_chunks(case, cache.select(indices), rest, selected_output)
    pairs = [(logits[i], case.expected[index][0, -_NUM_OTHER_TOKENS:]) for i, index in enumerate(order)]
    return LogitComparison(pairs, f"sequences 2, 0 and 0 of a batch of {list_lengths(prompts)} tokens")


# --- helpers


def require_decoder(case: VerificationCase) -> None:
    """Skip the check if the model has no decoder."""
    if case.config.decoder is None:
        raise CheckSkipped("an encoder-only model has no key-value cache")


def _new_cache(case: VerificationCase, **options: Any) -> KeyValueCache:
    """Return an empty cache."""
    require_decoder(case)
    return KeyValueCache(case.config, **options)


def cross_attention(case: VerificationCase, index: int | None = 0) -> EncoderOutput | None:
    """Return the encoder output of one source, or of all (None), with precomputed keys and values, as decoding does."""
    encoder_output = case.encoder_output(index)
    return None if encoder_output is None else case.network.precompute_cross_attention(encoder_output)


def _start_cache(case: VerificationCase) -> tuple[Tensor, Tensor, KeyValueCache]:
    """Return the first two thirds of the first sequence, the rest of it, and a cache that has read the former."""
    tokens, cache = case.tokens(), _new_cache(case)
    start = 2 * tokens.shape[1] // 3
    _read_chunks(case, cache, tokens[:, :start], cross_attention(case))
    return tokens[:, :start], tokens[:, start:], cache


def _read_chunks(
    case: VerificationCase,
    cache: KeyValueCache | PagedCache,
    tokens: Tensor,
    encoder_output: EncoderOutput | None,
    sizes: Sequence[int] = _UNEVEN_CHUNKS,
) -> Tensor:
    """Read tokens (B, T) in chunks of these sizes, repeated as needed; return their logits (B, T, V)."""
    chunks = tokens.split(list(chunk_sizes(tokens.shape[1], sizes)), dim=1)
    steps = [
        forward_step(case.network, chunk, cache, encoder_output=encoder_output, last_only=False) for chunk in chunks
    ]
    return torch.cat(steps, dim=1)


def chunk_sizes(length: int, sizes: Sequence[int]) -> Iterator[int]:
    """Repeat the sizes until they add up to `length`; the last is cut."""
    for size in cycle(sizes):
        yield min(size, length)
        length -= size
        if length <= 0:
            return


def other_tokens(case: VerificationCase, tokens: Tensor) -> Tensor:
    """Return tokens that differ from the given ones at every position."""
    return (tokens + 1) % case.config.vocab_size
