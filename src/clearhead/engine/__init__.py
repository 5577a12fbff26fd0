"""The engine: texts of many requests at once, by continuous batching over pages.

    for event in Engine(network).run(requests): ...

request     Request and Event: what callers give and get; no torch
sequence    one request on its way through the engine; no torch
scheduler   which tokens of which sequences the next step reads; no torch
batch       a schedule as packed tensors
runner      a packed batch through the network
sampler     the next token of each sequence
memory      how many pages fit
engine      add, abort, step
worker      a thread that steps an engine for callers in other threads

docs/engine.md follows a request through these modules.
"""

from clearhead.engine.engine import Engine, unsupported_by_engine
from clearhead.engine.request import Event, Request

__all__ = ["Engine", "Event", "Request", "unsupported_by_engine"]
