"""Toy engines: a few small pages, so that schedules run out of them."""

import torch

from clearhead.engine import Engine
from clearhead.engine.memory import bytes_per_token
from clearhead.generation.plain import decode_plainly
from clearhead.model import EncoderOutput


def toy_engine(network, num_pages=12, page_size=4, max_tokens=16, max_sequences=4):
    dtype = next(network.parameters()).dtype
    memory = bytes_per_token(network.config.output_stack, dtype) * page_size * num_pages
    return Engine(network, memory=memory, page_size=page_size, max_tokens=max_tokens, max_sequences=max_sequences)


def plain_tokens(network, request):
    """Return the tokens of the loop without a cache, which is the reference."""
    encoder_output: EncoderOutput | None = None
    if request.source:
        encoder_output = network.encode(torch.tensor([list(request.source)]))
    with torch.no_grad():
        return list(decode_plainly(network, request.prompt, request.options, encoder_output))


def finished_tokens(events):
    """Return the tokens and the finish reason of each request in a list of events."""
    tokens, reasons = {}, {}
    for event in events:
        tokens.setdefault(event.request_id, [])
        if event.token is not None:
            tokens[event.request_id].append(event.token)
        if event.finish_reason is not None:
            assert event.request_id not in reasons, "a request finishes once"
            reasons[event.request_id] = event.finish_reason
    return tokens, reasons


def check_no_page_is_lost(engine):
    """Assert that every page is free or cached once the engine has nothing to do."""
    for storage in (engine.runner.storage, engine.runner.source_storage):
        if storage is not None:
            pool = storage.pool
            assert pool.num_used == 0
            assert sum(pool.reference_counts) == 0
            assert sorted([*pool.free, *pool.cached]) == list(range(pool.num_pages))
