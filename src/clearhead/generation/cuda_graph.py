"""The decode loop on an NVIDIA GPU: the same rows, the same turns as decode.py, the step in one CUDA graph.

    if fits(network, rows, cache): turns = decode_in_graph(network, rows, cache)

The graph is asked for two tokens before the first of them is looked at, so that the GPU never waits for the host; what
it made beyond the end of a row is forgotten.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from clearhead.backends import AsyncTokens, GraphDecoder, triton_runs, why_no_cuda_graph
from clearhead.cache import ContiguousStore, KeyValueCache
from clearhead.generation.decode import TokenSequence, num_at_once, room
from clearhead.generation.sampling import check_numbers, next_tokens
from clearhead.generation.sampling_parameters import SamplingParameters
from clearhead.model import Transformer

FIRST_ROOM = 1024  # new tokens; a text that may go on for longer mostly ends before, and the cache doubles if not


def fits(network: Transformer, rows: Sequence[TokenSequence], cache: KeyValueCache | None = None) -> bool:
    if not triton_runs(network.device) or why_no_cuda_graph(network):
        return False
    if network.device.index not in (None, torch.cuda.current_device()):
        return False  # graphs are captured, and Triton's kernels launched, on the current device
    return all(is_plain(row) for row in rows) and past_fits(network, rows, cache)


def is_plain(row: TokenSequence) -> bool:
    """Penalties look at all tokens so far and log-probabilities at all logits: those stay with decode.py."""
    options = row.options
    penalties = options.repetition_penalty, options.presence_penalty, options.frequency_penalty
    return penalties == (1.0, 0.0, 0.0) and options.logprobs is None and not row.source


def past_fits(network: Transformer, rows: Sequence[TokenSequence], cache: KeyValueCache | None) -> bool:
    """None, or that of one row, as of a chat, held as the graph would hold it."""
    if cache is None:
        return not any(row.earlier for row in rows)
    like = next(network.parameters())
    held = [tensor for store in cache.stores for tensor in store.tensors().values()]
    same = all((len(part), part.dtype, part.device) == (1, like.dtype, like.device) for part in held)
    whole = cache.real is None and all(isinstance(store, ContiguousStore) for store in cache.stores)
    ours = cache.config == network.config and len(rows) == 1 and len(rows[0].earlier) == cache.length
    return same and whole and ours


@torch.inference_mode()
def decode_in_graph(
    network: Transformer, rows: Sequence[TokenSequence], cache: KeyValueCache | None = None
) -> Iterator[None]:
    """`cache`: of what the one row has `earlier`; the new tokens join it."""
    active = [row for row in rows if row.options.max_new_tokens > 0]
    if not active:
        return
    options = SamplingParameters.of([row.options for row in active], network.config.vocab_size, network.device)

    def choose(logits: Tensor, steps: Tensor) -> Tensor:
        return next_tokens(logits, options, steps)

    # A row that is done goes on until the last one is; two more are made while the host looks.
    lengths = [len(row.earlier) + len(row.prompt) for row in active]
    rooms = [room(network, length) for length in lengths]
    most = max(min(row.options.max_new_tokens, limit) for row, limit in zip(active, rooms, strict=True))
    used = max(lengths)
    decoder = GraphDecoder(network, len(active), used + min(most, FIRST_ROOM) + 2, choose, cache)

    def begin_next() -> AsyncTokens:
        nonlocal used
        if used == decoder.capacity:
            decoder.grow()
        used += 1
        return AsyncTokens(decoder.next())

    at_once = num_at_once(network.config.output_stack, used, None)
    logits = decoder.read([row.prompt for row in active], at_once)
    first = choose(logits, torch.zeros_like(decoder.step))
    check_numbers(logits, first)
    decoder.start(first)
    ready, pending = first.tolist(), begin_next()
    while True:
        coming = begin_next()
        for row, token, limit in zip(active, ready, rooms, strict=True):
            if not row.done:
                row.take(token, limit)
        yield
        if all(row.done for row in active):
            return
        ready, pending = pending.read(), coming
        if cache is not None:
            cache.wrote(1)  # the token before
