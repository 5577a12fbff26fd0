"""Measure engines in rounds: in each round every engine runs once, and medians over the rounds are compared.

    results = measure_speed(engines, target, prompt_length=128, num_tokens=128, rounds=5)

    |------ first token ------|-- token --|-- token --| ...      one run of one engine
     reads the prompt           decodes

Other work on the machine, and a CPU that heats up, therefore affect all engines equally.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from clearhead.benchmark.inference_engine import InferenceEngine
from clearhead.benchmark.memory_traffic import cache_bytes_read, read_bandwidth
from clearhead.benchmark.target import BenchmarkTarget

_WARM_UP_TOKENS = 3
# OpenMP's threads spin for up to 0.2 s after work (Intel's KMP_BLOCKTIME), which would slow down the next engine.
PAUSE_SECONDS = 0.25

T = TypeVar("T")
OnRun = Callable[[str], object]  # called with a description before each of the num_runs runs


@dataclass(frozen=True)
class Run:
    """The tokens and times of one run of an engine."""

    tokens: list[int]
    first_token_seconds: float
    token_seconds: list[float]  # of each token after the first


@dataclass(frozen=True)
class SpeedResult:
    """The speed of one engine, as medians over the rounds."""

    engine: str
    weights: str
    tokens_per_second: float | None  # None if only the prompt was read
    prefill_tokens_per_second: float
    first_token_seconds: float
    bandwidth_share: float | None  # bytes_per_token / seconds per token / bandwidth of this machine
    bytes_per_token: int
    spread: float  # (slowest - fastest) / median of the rounds
    tokens_equal_to_ours: int | None  # up to the first that differs from Clearhead's with the same weights
    bandwidth_bytes_per_second: float  # of this machine in this run


@dataclass(frozen=True)
class GrowthResult:
    """The time per token of one engine after `context` tokens, and what reading the cache alone would add to it."""

    engine: str
    weights: str
    context: int
    seconds_per_token: float
    spread: float
    cache_bytes_per_token: int
    added_seconds: float  # compared with the shortest context
    predicted_added_seconds: float  # the additional cache bytes divided by the measured bandwidth


def measure_speed(
    engines: Sequence[InferenceEngine],
    target: BenchmarkTarget,
    prompt_length: int,
    num_tokens: int,
    rounds: int,
    on_run: OnRun = lambda description: None,
) -> list[SpeedResult]:
    """Measure the speed of each engine; with num_tokens=1, only that of reading the prompt."""
    runs, bandwidth = _run_rounds(engines, target, [prompt_length], num_tokens, rounds, on_run)
    ours = {engine.weights: runs[engine, prompt_length][0].tokens for engine in engines if engine.name == "clearhead"}
    return [
        _summarize_speed(
            engine, target, prompt_length, runs[engine, prompt_length], bandwidth, ours.get(engine.weights)
        )
        for engine in engines
    ]


def measure_growth(
    engines: Sequence[InferenceEngine],
    target: BenchmarkTarget,
    contexts: Sequence[int],
    num_tokens: int,
    rounds: int,
    on_run: OnRun = lambda description: None,
) -> list[GrowthResult]:
    """Measure how the time per token of each engine grows with the length of the context."""
    runs, bandwidth = _run_rounds(engines, target, contexts, num_tokens, rounds, on_run)
    return [
        result
        for engine in engines
        for result in _summarize_growth(engine, target, {c: runs[engine, c] for c in contexts}, bandwidth)
    ]


def num_runs(engines: Sequence[InferenceEngine], num_lengths: int, rounds: int) -> int:
    """Return the number of runs of a measurement, warm-up included."""
    return len(engines) * (1 + num_lengths * rounds)


# --- runs


def _run_rounds(
    engines: Sequence[InferenceEngine],
    target: BenchmarkTarget,
    lengths: Sequence[int],
    num_tokens: int,
    rounds: int,
    on_run: OnRun,
) -> tuple[dict[tuple[InferenceEngine, int], list[Run]], float]:
    """Return all runs by engine and prompt length, and the highest bandwidth measured between the rounds."""
    prompts = {length: target.prompt(length) for length in lengths}
    for engine in engines:
        on_run(f"warming up {engine}")
        run_engine(engine, prompts[lengths[0]], min(num_tokens, _WARM_UP_TOKENS))
    runs: dict[tuple[InferenceEngine, int], list[Run]] = {
        (engine, length): [] for engine in engines for length in lengths
    }
    bandwidth = 0.0
    for number in range(rounds):
        time.sleep(PAUSE_SECONDS)
        bandwidth = max(bandwidth, read_bandwidth(target.device))
        for length in lengths:
            for engine in rotate(engines, number):
                on_run(f"round {number + 1} of {rounds}: {engine}")
                time.sleep(PAUSE_SECONDS)
                runs[engine, length].append(run_engine(engine, prompts[length], num_tokens))
    return runs, bandwidth


def rotate(engines: Sequence[T], number: int) -> Iterator[T]:
    """Yield the engines starting with another one in each round."""
    for index in range(len(engines)):
        yield engines[(index + number) % len(engines)]


def run_engine(engine: InferenceEngine, prompt: Sequence[int], num_tokens: int) -> Run:
    """Run an engine once and take the time of every token."""
    tokens, times = [], []

    def on_token(token: int) -> None:
        times.append(time.perf_counter())
        tokens.append(token)

    start = time.perf_counter()
    engine.generate(prompt, num_tokens, on_token)
    assert len(tokens) == num_tokens, f"{engine} generated {len(tokens)} of {num_tokens} tokens"
    return Run(tokens, times[0] - start, [after - before for before, after in pairwise(times)])


# --- results


def _summarize_speed(
    engine: InferenceEngine,
    target: BenchmarkTarget,
    prompt_length: int,
    runs: Sequence[Run],
    bandwidth: float,
    our_tokens: Sequence[int] | None,
) -> SpeedResult:
    """Return the result of one engine; our_tokens are Clearhead's with the same weights."""
    first_token_seconds = statistics.median(run.first_token_seconds for run in runs)
    decodes = bool(runs[0].token_seconds)
    round_seconds = [statistics.fmean(run.token_seconds) if decodes else run.first_token_seconds for run in runs]
    seconds = statistics.median(round_seconds)
    average_length = prompt_length + len(runs[0].tokens) // 2
    num_bytes = engine.weight_bytes + cache_bytes(engine, target, average_length)
    is_ours = engine.name == "clearhead"
    return SpeedResult(
        engine=engine.name,
        weights=engine.weights,
        tokens_per_second=1 / seconds if decodes else None,
        prefill_tokens_per_second=prompt_length / first_token_seconds,
        first_token_seconds=first_token_seconds,
        bandwidth_share=num_bytes / seconds / bandwidth if decodes else None,
        bytes_per_token=num_bytes,
        spread=_relative_spread(round_seconds),
        tokens_equal_to_ours=None if our_tokens is None or is_ours else count_equal(runs[0].tokens, our_tokens),
        bandwidth_bytes_per_second=bandwidth,
    )


def _summarize_growth(
    engine: InferenceEngine, target: BenchmarkTarget, runs: dict[int, list[Run]], bandwidth: float
) -> Iterator[GrowthResult]:
    """Yield the results of one engine from its runs by context length."""
    shortest = min(runs)
    # The median over all single tokens: a few tokens at a long context are enough.
    seconds = {c: statistics.median(s for run in runs[c] for s in run.token_seconds) for c in runs}
    num_bytes = {c: cache_bytes(engine, target, c + len(runs[c][0].tokens) // 2) for c in runs}
    for context in sorted(runs):
        yield GrowthResult(
            engine=engine.name,
            weights=engine.weights,
            context=context,
            seconds_per_token=seconds[context],
            spread=_relative_spread([statistics.median(run.token_seconds) for run in runs[context]]),
            cache_bytes_per_token=num_bytes[context],
            added_seconds=seconds[context] - seconds[shortest],
            predicted_added_seconds=(num_bytes[context] - num_bytes[shortest]) / bandwidth,
        )


def cache_bytes(engine: InferenceEngine, target: BenchmarkTarget, length: int) -> int:
    """Return the cache bytes that a token reads in this engine after `length` others."""
    return cache_bytes_read(target.model.config, length, engine.cache_element_bytes)


def _relative_spread(seconds: Sequence[float]) -> float:
    return (max(seconds) - min(seconds)) / statistics.median(seconds)


def count_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of equal tokens before the first that differs."""
    pairs = zip(tokens, others, strict=True)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), len(tokens))
