"""Measure how fast engines answer many concurrent requests; in every round, each engine runs once.

    results = measure_serving(engines, [Load(concurrency=8, num_requests=16)], vocab_size, rounds=3, notify=print)

In each round every engine gets the same requests, one engine after the other. No two requests of a measurement have the
same prompt, so a cached prefix helps only where `shared_prefix` asks for one. Every round has a prefix of its own: its
first request must read it.
"""

import time
from collections.abc import Callable, Sequence

from clearhead.benchmark.clearhead_server import ClearheadServer
from clearhead.benchmark.clearhead_serving import ClearheadServing
from clearhead.benchmark.measurement import PAUSE_SECONDS, OnRun, rotate
from clearhead.benchmark.serving_engine import ServingEngine
from clearhead.benchmark.serving_load import Load, LoadRun, run_load
from clearhead.benchmark.serving_result import ServingResult, summarize
from clearhead.errors import ClearheadError

_WARM_UP_TOKENS = 3


def measure_serving(
    engines: Sequence[ServingEngine],
    loads: Sequence[Load],
    vocab_size: int,
    rounds: int,
    notify: Callable[[str], object],
    on_run: OnRun = lambda description: None,
) -> list[ServingResult]:
    """Measure all engines under each load, those with the same weights in turns; others wait without their weights.

    notify: is called with a sentence about each engine that cannot run, and with the notes of the others.
    """
    results: list[ServingResult] = []
    notes: dict[str, None] = {}

    def notify_once(note: str) -> None:
        if note not in notes:
            notify(note)
        notes[note] = None

    for weights in dict.fromkeys(engine.weights for engine in engines):
        group = [engine for engine in engines if engine.weights == weights]
        try:
            for load in loads:
                results += _measure_load(group, load, vocab_size, rounds, notify_once, on_run)
        finally:
            for engine in group:
                engine.close()
    if not results:
        raise ClearheadError("no engine can run this model here; the notes above give the reasons")
    return results


def num_serving_runs(engines: Sequence[ServingEngine], loads: Sequence[Load], rounds: int) -> int:
    """Return how often `measure_serving` calls on_run: opening and warming up an engine count as runs too."""
    return len(engines) * len(loads) * (rounds + 2)


def _measure_load(
    engines: Sequence[ServingEngine],
    load: Load,
    vocab_size: int,
    rounds: int,
    notify: Callable[[str], object],
    on_run: OnRun,
) -> list[ServingResult]:
    """Open the engines for one load, warm them up, and measure them in rounds."""
    opened: list[ServingEngine] = []
    for engine in engines:
        on_run(f"{_describe(engine, load)}: opening")
        try:
            engine.open(load.concurrency, load.capacity)
        except ClearheadError as error:
            notify(f"skipped {engine} with {load.concurrency} clients: {error}")
            continue
        if engine.note is not None:
            notify(f"{engine} {engine.note}")
        opened.append(engine)
    runs: dict[ServingEngine, list[LoadRun]] = {engine: [] for engine in opened}
    for number in range(-1, rounds):  # the first one warms up
        prompts = load.prompts(vocab_size, f"round {number} of {load}")
        for engine in rotate(opened, max(number, 0)):
            time.sleep(PAUSE_SECONDS)
            if number < 0:
                on_run(f"{_describe(engine, load)}: warming up")
                run_load(engine, prompts[: load.concurrency], load.concurrency, min(load.num_tokens, _WARM_UP_TOKENS))
            else:
                on_run(f"{_describe(engine, load)}: round {number + 1} of {rounds}")
                runs[engine].append(run_load(engine, prompts, load.concurrency, load.num_tokens))
    by_name = {engine.name: runs[engine] for engine in opened}
    ours, our_server = by_name.get(ClearheadServing.name), by_name.get(ClearheadServer.name)
    return [summarize(engine, load, runs[engine], ours, our_server) for engine in opened]


def _describe(engine: ServingEngine, load: Load) -> str:
    return f"{engine}, {load.concurrency} clients"
