"""Put a random load on an engine, with aborts, bad requests and callers that go away, and watch its memory.

    python -m tests.slow.engine_load smollm2 --weights int4 --minutes 10
    python -m tests.slow.engine_load llama-3.2-1b --minutes 3 --device cuda     # a preset with random weights

Every request must be answered or refused, the answers to a fixed request must have the same length and, if the engine
is deterministic (--deterministic; on a CPU it always is), be equal, no page may be lost, and the memory of the process
must not grow after the first quarter of the time. The system provides the memory of a page when it is first written,
which would look like growth for as long as some page is new: so all pages are written before the load begins. A GPU
captures the step of a batch size when it is first needed: so every batch size runs before the load begins, too.
"""

import argparse
import json
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product

import torch

import clearhead
from clearhead.api import Model
from clearhead.engine import Engine, EngineWorker, Request
from clearhead.engine.graph_executor import GraphExecutor
from clearhead.errors import ClearheadError
from clearhead.families import presets
from clearhead.options import SamplingOptions

PROBE = [5, 6, 7, 8, 9, 10, 11, 12] * 6
MAX_SEQUENCES = 8
MEMORY = 64 * 2**20  # bytes of pages: few, so that texts compete for them
MAX_GROWTH = 16 * 2**20  # bytes between the medians of the second and the last quarter: what the allocator keeps


def resident_bytes() -> int:
    """Return the resident memory of this process, or the allocated memory of the GPU if there is one in use."""
    if torch.cuda.is_available() and torch.cuda.memory_allocated():
        return torch.cuda.memory_allocated()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def open_model(name: str, device: str, weights: str = "full") -> Model:
    """Load a model, or create one with random weights for a preset."""
    if name in presets():
        return clearhead.create(name, dtype="bfloat16" if device == "cuda" else "float32", device=device)
    return clearhead.load(name, device=device, weights=weights)


class Load:
    """Client threads that send random requests to a worker until the time is over."""

    def __init__(self, worker: EngineWorker, vocab_size: int, capacity: int, seconds: float):
        self.worker, self.vocab_size, self.capacity = worker, vocab_size, capacity
        self.end = time.monotonic() + seconds
        self.outcomes: Counter[str] = Counter()
        self.num_tokens = 0
        self.errors: list[str] = []
        self.lock = threading.Lock()
        self.shared_prefix = [random.Random(0).randrange(vocab_size) for _ in range(100)]

    def client(self, seed: int) -> None:
        """Send requests one after another."""
        rng = random.Random(seed)
        while time.monotonic() < self.end:
            try:
                self.send(rng)
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")

    def send(self, rng: random.Random) -> None:
        """Send one request, read its events or abort it, and record what came of it."""
        stream = self.worker.submit(self.request(rng))
        aborts_after = rng.choice([None, None, None, 0, 3])
        tokens, reason = 0, None
        for event in stream:
            tokens += event.token is not None
            reason = event.finish_reason
            if aborts_after is not None and tokens >= aborts_after:
                stream.abort()
        with self.lock:
            self.outcomes[str(reason)] += 1
            self.num_tokens += tokens

    def request(self, rng: random.Random) -> Request:
        """Return a random request; one in twenty is invalid or can never fit."""
        prompt = [rng.randrange(self.vocab_size) for _ in range(rng.randint(1, 120))]
        if rng.random() < 0.3:
            prompt = self.shared_prefix[: rng.randint(32, 100)] + prompt[:20]
        max_new_tokens = rng.randint(1, 60)
        if rng.random() < 0.05:
            prompt = rng.choice([[], [self.vocab_size], prompt])
            max_new_tokens = self.capacity + 1
        options = SamplingOptions(
            max_new_tokens=max_new_tokens,
            temperature=rng.choice([0.0, 0.8]),
            seed=rng.randrange(2**31),
            top_p=rng.choice([None, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            logprobs=rng.choice([None, None, 2]),
        )
        return Request(prompt=prompt, options=options)


def occupy_pages(engine: Engine) -> int:
    """Write all pages, so that they are resident, and return the bytes by which that made this process grow."""
    before = resident_bytes()
    executor = engine.executor
    storage = executor.storage if isinstance(executor, GraphExecutor) else executor.runner.storage  # type: ignore[attr-defined]
    for tensor in (tensor for tensors in storage.layers.values() for tensor in tensors):
        tensor.fill_(0)
    return resident_bytes() - before


def run_all_batch_sizes(engine: Engine) -> None:
    """Run every number of sequences with and without a penalty, which a captured step of its own applies."""
    for size, penalty in product(range(1, MAX_SEQUENCES + 1), (1.0, 1.2)):
        options = SamplingOptions(max_new_tokens=4, repetition_penalty=penalty)
        list(engine.run([Request(prompt=PROBE[: size + 1], options=options) for _ in range(size)]))


def probe(worker: EngineWorker) -> list[int | None]:
    """Return the tokens of a request that is always the same."""
    request = Request(prompt=PROBE, options=SamplingOptions(max_new_tokens=16))
    return [event.token for event in worker.submit(request)]


def run(
    model: Model, seconds: float, num_clients: int = 12, memory: int | None = None, deterministic: bool | None = None
) -> dict[str, object]:
    """Run the load and return what was seen. Raise AssertionError if something was lost, changed or leaked."""
    engine = model.engine(memory=memory, max_sequences=MAX_SEQUENCES, deterministic=deterministic)
    page_bytes = occupy_pages(engine)
    run_all_batch_sizes(engine)
    samples: list[int] = []
    probes: Counter[tuple[int | None, ...]] = Counter()
    with EngineWorker(engine) as worker:
        load = Load(worker, model.config.vocab_size, engine.capacity, seconds)
        clients = [threading.Thread(target=load.client, args=(seed,)) for seed in range(num_clients)]
        for client in clients:
            client.start()
        start = time.monotonic()
        while any(client.is_alive() for client in clients):
            time.sleep(min(seconds / 40, 5))
            probes[tuple(probe(worker))] += 1
            samples.append(resident_bytes())
        elapsed = time.monotonic() - start
    medians = [int(statistics.median(part)) for part in quarters(samples)]
    growth = medians[3] - medians[1]
    result = {
        "seconds": round(elapsed, 1),
        "requests": dict(load.outcomes),
        "tokens": load.num_tokens,
        "probes": sum(probes.values()),
        "different_answers_to_the_probe": len(probes),
        "bytes_of_pages": page_bytes,
        "resident_bytes_by_quarter": medians,
        "growth_in_bytes": growth,
    }
    pool = engine.scheduler.pool
    assert not load.errors, load.errors[:3]
    assert pool.num_used == 0, f"{pool.num_used} pages are lost"
    assert sum(pool.reference_counts) == 0
    assert len({len(tokens) for tokens in probes}) == 1, result
    assert len(probes) == 1 or not engine.deterministic, result
    assert growth <= MAX_GROWTH, result
    assert load.outcomes.keys() <= {"stop", "length", "context", "aborted", "error"}, result
    return result


def quarters(samples: Sequence[int]) -> list[Sequence[int]]:
    """Return the four quarters of a list with at least four entries."""
    bounds = [len(samples) * number // 4 for number in range(5)]
    return [samples[start:stop] for start, stop in pairwise(bounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--weights", default="full", help="full, int8, int4 or stored, of a model that is loaded")
    parser.add_argument("--memory", type=int, default=MEMORY, help="bytes for keys and values")
    parser.add_argument("--deterministic", action="store_true", help="on a GPU: the same bits whatever runs beside")
    arguments = parser.parse_args()
    try:
        model = open_model(arguments.model, arguments.device, arguments.weights)
    except ClearheadError as error:
        raise SystemExit(str(error)) from None
    result = run(model, arguments.minutes * 60, memory=arguments.memory, deterministic=arguments.deterministic or None)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
