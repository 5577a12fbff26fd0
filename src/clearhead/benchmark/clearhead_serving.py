"""Clearhead's engine under load, in each weight format. The benchmark's own thread runs the steps: no thread waits.

engine = ClearheadServing(target, "int4"); engine.open(concurrency=8, capacity=128)
"""

import time
from collections.abc import Sequence

import torch

from clearhead.architecture import ModelConfig
from clearhead.benchmark.clearhead_engine import accelerate_or_explain, copy_network
from clearhead.benchmark.serving_engine import ServingEngine
from clearhead.benchmark.target import BenchmarkTarget
from clearhead.engine import MAX_SEQUENCES, Engine, Request, bytes_per_token, unsupported_by_engine
from clearhead.errors import ClearheadError
from clearhead.model import Transformer
from clearhead.options import SamplingOptions

_SPARE_TOKENS = 64  # per request: its last page is partly empty, and another one is kept free for the next token


def cache_bytes(config: ModelConfig, dtype: torch.dtype, concurrency: int, capacity: int) -> int:
    """Return how many bytes the KV cache needs if every client has one text in it."""
    return concurrency * (capacity + _SPARE_TOKENS) * bytes_per_token(config.output_stack, dtype)


class ClearheadServing(ServingEngine):
    """The engine of this package."""

    name = "clearhead"

    def __init__(self, target: BenchmarkTarget, weights: str):
        self.target, self.weights = target, weights
        if weights == "stored":
            target.gguf_file()
        if reason := unsupported_by_engine(target.model.config):
            raise ClearheadError(reason)
        self.network: Transformer | None = None
        self.engine: Engine | None = None
        self.numbers: dict[int, int] = {}  # the engine's id -> the number of the request
        self.token_times: dict[int, list[float]] = {}

    def open(self, concurrency: int, capacity: int) -> None:
        if self.network is None:
            self.network = copy_network(self.target, self.weights)
            self.note = accelerate_or_explain(self.network)
        self.engine = None  # frees its pages first
        dtype = next(self.network.parameters()).dtype
        memory = cache_bytes(self.network.config, dtype, concurrency, capacity)
        self.engine = Engine(self.network, memory=memory, max_sequences=max(MAX_SEQUENCES, concurrency))

    def send(self, number: int, prompt: Sequence[int], num_tokens: int) -> None:
        assert self.engine is not None
        request = Request(prompt=prompt, options=SamplingOptions(max_new_tokens=num_tokens))
        self.numbers[self.engine.add(request)] = number

    def wait(self) -> list[int]:
        assert self.engine is not None
        events, now = self.engine.step(), time.perf_counter()
        if failed := next((event for event in events if event.error is not None), None):
            raise ClearheadError(f"{self} failed: {failed.error}")
        for event in events:
            self.token_times.setdefault(self.numbers[event.request_id], []).append(now)
        return [self.numbers[event.request_id] for event in events if event.finish_reason is not None]

    def take_token_times(self) -> dict[int, list[float]]:
        taken, self.token_times = self.token_times, {}
        return taken

    def close(self) -> None:
        self.network = self.engine = None
