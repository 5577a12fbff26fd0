"""`clearhead serve` under load: the server as a process of its own, asked over HTTP as llama.cpp's server is.

    engine = ClearheadServer(target, "int4"); engine.open(concurrency=8, capacity=128)

The server runs with its default settings. Only the number of concurrent requests, the memory of the KV cache and the
number of threads are set, to those of the engine that runs in the benchmark itself.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from clearhead.benchmark.clearhead_engine import DTYPES
from clearhead.benchmark.clearhead_serving import cache_bytes
from clearhead.benchmark.server_process import ServerProcess
from clearhead.benchmark.target import BenchmarkTarget
from clearhead.engine import unsupported_by_engine
from clearhead.errors import ClearheadError

_LOAD_OPTIONS = {  # weight format -> options of `clearhead serve`
    "float32": ("--dtype", "float32"),
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--weights", "int8"),
    "int4": ("--weights", "int4"),
    "stored": ("--weights", "stored"),
}


class ClearheadServer(ServerProcess):
    """A process of `clearhead serve`."""

    name = program_name = "clearhead serve"
    path = "/v1/completions"

    def __init__(self, target: BenchmarkTarget, weights: str):
        super().__init__(target, weights)
        if weights == "stored":
            target.gguf_file()
        if reason := unsupported_by_engine(target.model.config):
            raise ClearheadError(reason)
        self.model_path = target.path or target.huggingface_folder()

    def command(self, concurrency: int, capacity: int) -> list[str]:
        # A GGUF file whose token table stays packed runs in float32.
        dtype = torch.float32 if self.weights == "stored" else DTYPES.get(self.weights, torch.bfloat16)
        memory = cache_bytes(self.target.model.config, dtype, concurrency, capacity)
        return [
            *(sys.executable, "-m", "clearhead", "serve", str(self.model_path)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--max-concurrent", str(concurrency)),
            *("--memory-gb", str(memory / 1e9)),
            *("--device", str(self.target.device), "--threads", str(self.target.num_threads)),
            *_LOAD_OPTIONS[self.weights],
        ]

    def request_body(self, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
        return {
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},  # counts in every event
            "ignore_eos": True,
            "temperature": 0,
        }

    def num_tokens_in(self, event: Mapping[str, Any]) -> int | None:
        usage = event.get("usage")
        return None if usage is None else int(usage["completion_tokens"])
