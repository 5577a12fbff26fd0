"""The continuous batching of Hugging Face transformers under load, on a folder that Clearhead wrote.

    engine = HuggingFaceServing(target, "bfloat16"); engine.open(concurrency=8, capacity=128)

Its scheduler runs in a thread of this process.
"""

import time
from collections.abc import Sequence
from typing import Any

from clearhead.benchmark.huggingface import find_class, load_in_transformers
from clearhead.benchmark.serving_engine import ServingEngine
from clearhead.benchmark.target import BenchmarkTarget, import_transformers
from clearhead.errors import ClearheadError

_PAGE_SIZE = 256  # tokens; its default
_STEP_TOKENS = 512  # tokens that one step reads at most; on a CPU it has no default
_NO_TOKEN = -1  # as an end token: no token ends a text


class HuggingFaceServing(ServingEngine):
    """A model of transformers in float32 or bfloat16, with its ContinuousBatchingManager."""

    name = "huggingface"

    def __init__(self, target: BenchmarkTarget, weights: str):
        self.target, self.weights = target, weights
        self.transformers = import_transformers()
        if not hasattr(find_class(target), "init_continuous_batching"):
            raise ClearheadError("the installed version has no continuous batching; run: pip install -U transformers")
        self.network: Any = None
        self.manager: Any = None
        self.asked: dict[str, tuple[int, int]] = {}  # the manager's id -> the number of the request, and of its tokens
        self.token_times: dict[int, list[float]] = {}

    def open(self, concurrency: int, capacity: int) -> None:
        if self.network is None:
            self.network = load_in_transformers(self.target, self.weights)
        self._stop()
        on_cpu = self.target.device.type == "cpu"
        self.manager = self.network.init_continuous_batching(
            generation_config=self.transformers.GenerationConfig(do_sample=False, eos_token_id=_NO_TOKEN),
            continuous_batching_config=self.transformers.ContinuousBatchingConfig(
                page_size=_PAGE_SIZE,
                num_blocks=concurrency * -(-capacity // _PAGE_SIZE) + 1 if on_cpu else None,
                max_batch_tokens=max(_STEP_TOKENS, concurrency) if on_cpu else None,
            ),
        )
        self.manager.warmup()
        self.manager.start()

    def send(self, number: int, prompt: Sequence[int], num_tokens: int) -> None:
        request_id = self.manager.add_request(
            list(prompt), max_new_tokens=num_tokens, streaming=True, eos_token_id=_NO_TOKEN
        )
        if request_id is None:
            raise ClearheadError(f"{self} failed: its thread has ended")
        self.asked[request_id], self.token_times[number] = (number, num_tokens), []

    def wait(self) -> list[int]:
        output, now = self.manager.get_result(timeout=1), time.perf_counter()
        if output is None and not self.manager.is_running():
            raise ClearheadError(f"{self} failed: its thread has ended")
        if output is None:
            return []
        if output.error is not None:
            raise ClearheadError(f"{self} failed: {output.error}")
        number, num_tokens = self.asked[output.request_id]
        times = self.token_times[number]
        was_finished = len(times) >= num_tokens
        times += [now] * (len(output.generated_tokens) - len(times))
        return [number] if len(times) >= num_tokens and not was_finished else []

    def take_token_times(self) -> dict[int, list[float]]:
        taken, self.token_times = self.token_times, {}
        return taken

    def close(self) -> None:
        self._stop()
        self.network = None

    def _stop(self) -> None:
        if self.manager is not None:
            self.manager.stop(block=True, hard_stop=True)
            self.manager.destroy()
            self.manager = None
