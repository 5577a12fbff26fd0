"""The times of a load, and their summary: throughput and percentiles, as medians over the rounds.

result = summarize(engine, load, runs, our_runs, our_server_runs)
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clearhead.benchmark.serving_engine import ServingEngine
from clearhead.benchmark.serving_load import Load, LoadRun


@dataclass(frozen=True)
class ServingResult:
    """The speed of one engine under one load. Every number is the median over the rounds."""

    engine: str
    weights: str
    concurrency: int
    num_requests: int
    prompt_length: int
    shared_prefix: int
    num_tokens: int  # new ones of each request
    tokens_per_second: float  # new tokens of all requests
    requests_per_second: float
    first_token_p50: float  # seconds
    first_token_p99: float
    between_tokens_p50: float  # seconds
    between_tokens_p99: float
    first_request_seconds: float  # until the first token of the first request, which reads the shared prefix
    later_request_seconds: float | None  # the same of requests that are sent once others are finished, p50
    spread: float  # of the tokens per second: (fastest - slowest round) / median
    clearhead_ratio: float | None  # Clearhead's tokens per second divided by this engine's, round by round
    clearhead_ratio_range: tuple[float, float] | None  # the smallest and the largest of the rounds
    server_ratio: float | None = None  # the same for `clearhead serve`, over HTTP
    server_ratio_range: tuple[float, float] | None = None


def summarize(
    engine: ServingEngine,
    load: Load,
    runs: Sequence[LoadRun],
    our_runs: Sequence[LoadRun] | None,
    our_server_runs: Sequence[LoadRun] | None = None,
) -> ServingResult:
    """Return the result of one engine. our_runs and our_server_runs are Clearhead's, round by round."""

    def median(value: Callable[[LoadRun], float]) -> float:
        return statistics.median(map(value, runs))

    speeds = [run.tokens_per_second for run in runs]
    has_later = load.num_requests > load.concurrency
    ratios, server_ratios = (
        None if ours is None or ours is runs else _ratios(ours, runs) for ours in (our_runs, our_server_runs)
    )
    return ServingResult(
        engine=engine.name,
        weights=engine.weights,
        concurrency=load.concurrency,
        num_requests=load.num_requests,
        prompt_length=load.prompt_length,
        shared_prefix=load.shared_prefix,
        num_tokens=load.num_tokens,
        tokens_per_second=statistics.median(speeds),
        requests_per_second=statistics.median(speeds) / load.num_tokens,
        first_token_p50=median(lambda run: percentile(run.first_token_seconds, 50)),
        first_token_p99=median(lambda run: percentile(run.first_token_seconds, 99)),
        between_tokens_p50=median(lambda run: percentile(run.token_seconds, 50)),
        between_tokens_p99=median(lambda run: percentile(run.token_seconds, 99)),
        first_request_seconds=median(lambda run: run.first_token_seconds[0]),
        later_request_seconds=(
            median(lambda run: percentile(run.first_token_seconds[load.concurrency :], 50)) if has_later else None
        ),
        spread=(max(speeds) - min(speeds)) / statistics.median(speeds),
        clearhead_ratio=None if ratios is None else statistics.median(ratios),
        clearhead_ratio_range=None if ratios is None else (min(ratios), max(ratios)),
        server_ratio=None if server_ratios is None else statistics.median(server_ratios),
        server_ratio_range=None if server_ratios is None else (min(server_ratios), max(server_ratios)),
    )


def _ratios(ours: Sequence[LoadRun], theirs: Sequence[LoadRun]) -> list[float]:
    """Return our tokens per second divided by theirs, round by round."""
    return [our.tokens_per_second / their.tokens_per_second for our, their in zip(ours, theirs, strict=True)]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` percent of the values do not exceed."""
    return sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1]
