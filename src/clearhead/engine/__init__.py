"""The engine: texts of many requests at once, by continuous batching over pages.

    for event in Engine(network).run(requests): ...

engine          Engine: add and abort requests, run a step
request         Request, TokenFilter and Event: what callers give and get; no tensors
sequence        one request on its way through the engine; no tensors
windows         which tokens are outside of the windows of all layers; no tensors
scheduler       which tokens of which sequences the next step reads; no tensors
batch           a schedule as packed tensors
executor        the interface of executors, which run a schedule and choose the next tokens; one that runs modules
graph_executor  one for NVIDIA GPUs, which starts a step before the tokens of the last one are known
executors       the choice of an executor for a network
runner          run a packed batch in the network's modules
parallel_runner run it in several processes, each with a shard of the network
sampler         the next token of each sequence
drafting        guesses of the next tokens
token_filters   the tokens that the filters of requests allow
prompt_scores   log-probabilities of prompts
memory          how many pages fit
reports         what events say about prompts and errors
statistics      how busy an engine is
shared          one engine for callers in several threads: whoever waits runs the next step
provider        the engine of a network, created on first use
worker          a thread that runs the steps, for callers that must not wait

docs/engine.md follows a request through these modules.
"""

from clearhead.engine.engine import MAX_SEQUENCES, Engine, EngineSettings
from clearhead.engine.executors import unsupported_by_engine
from clearhead.engine.memory import bytes_per_token, default_memory
from clearhead.engine.parallel_runner import Channel, LostProcessError, MessageKind, follow_steps
from clearhead.engine.provider import EngineProvider
from clearhead.engine.request import Event, PromptReport, Request, TokenDrafter, TokenFilter
from clearhead.engine.shared import SharedEngine
from clearhead.engine.statistics import EngineStatistics
from clearhead.engine.worker import EngineWorker, EventStream

__all__ = [
    "MAX_SEQUENCES",
    "Channel",
    "Engine",
    "EngineProvider",
    "EngineSettings",
    "EngineStatistics",
    "EngineWorker",
    "Event",
    "EventStream",
    "LostProcessError",
    "MessageKind",
    "PromptReport",
    "Request",
    "SharedEngine",
    "TokenDrafter",
    "TokenFilter",
    "bytes_per_token",
    "default_memory",
    "follow_steps",
    "unsupported_by_engine",
]
