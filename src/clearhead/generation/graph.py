"""The decode loop on an NVIDIA GPU: the same rows, the same turns as decode.py, the step in one CUDA graph.

    if fits(network, rows): turns = decode_in_graph(network, rows)

The graph is asked for two tokens before the first of them is looked at, so that the GPU never waits for the host; what
it made beyond the end of a row is forgotten.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from clearhead.fast.cuda import GraphDecoder, Mailbox, why_not
from clearhead.fast.launch import triton_runs
from clearhead.generation.decode import Row, room
from clearhead.generation.rows import RowOptions
from clearhead.generation.sampling import check_numbers, next_tokens
from clearhead.model.transformer import Transformer

FIRST_ROOM = 1024  # new tokens; a text that may go on for longer mostly ends before, and the cache doubles if not


def fits(network: Transformer, rows: Sequence[Row]) -> bool:
    if not triton_runs(network.device) or why_not(network):
        return False
    if network.device.index not in (None, torch.cuda.current_device()):
        return False  # graphs are captured, and Triton's kernels launched, on the current device
    return all(is_plain(row) for row in rows)


def is_plain(row: Row) -> bool:
    """Penalties look at all tokens so far and log-probabilities at all logits: those stay with decode.py."""
    options = row.options
    penalties = options.repetition_penalty, options.presence_penalty, options.frequency_penalty
    return penalties == (1.0, 0.0, 0.0) and options.logprobs is None and not (row.earlier or row.source)


@torch.no_grad()
def decode_in_graph(network: Transformer, rows: Sequence[Row]) -> Iterator[None]:
    active = [row for row in rows if row.options.max_new_tokens > 0]
    if not active:
        return
    options = RowOptions.of([row.options for row in active], network.config.vocab_size, network.device)

    def choose(logits: Tensor, steps: Tensor) -> Tensor:
        return next_tokens(logits, options, steps)

    # A row that is done goes on until the last one is; two more are made while the host looks.
    rooms = [room(network, len(row.prompt)) for row in active]
    most = max(min(row.options.max_new_tokens, limit) for row, limit in zip(active, rooms, strict=True))
    capacity = max(len(row.prompt) for row in active) + min(most, FIRST_ROOM) + 2
    decoder = GraphDecoder(network, len(active), capacity, choose)
    logits = decoder.read([row.prompt for row in active])
    first = choose(logits, torch.zeros_like(decoder.step))
    check_numbers(logits, first)
    decoder.start(first)
    ready, pending = first.tolist(), Mailbox(decoder.next())
    while True:
        coming = Mailbox(decoder.next())
        for row, token, limit in zip(active, ready, rooms, strict=True):
            if not row.done:
                row.take(token, limit)
        yield
        if all(row.done for row in active):
            return
        ready, pending = pending.read(), coming
