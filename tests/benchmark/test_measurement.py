"""Test rounds, medians and bandwidth shares on a fake clock, where every number is known."""

from itertools import pairwise

import pytest

from clearhead.api import Model
from clearhead.benchmark import BenchmarkTarget, measure_growth, measure_speed, measurement, num_runs
from clearhead.benchmark.measurement import count_equal, run_engine
from tests.benchmark.doubles import FakeClock, FakeEngine
from tests.checkpoint.tiny import tiny_network

BANDWIDTH = 1e6  # bytes per second
CACHE_ELEMENTS = 2 * 2 * 2 * 4  # of one token: layers, key-value heads, key and value, head width


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(measurement, "time", clock)
    monkeypatch.setattr(measurement, "read_bandwidth", lambda device: BANDWIDTH)
    return clock


@pytest.fixture
def target(tmp_path):
    return BenchmarkTarget(Model(tiny_network()), None, 64, tmp_path)


def test_speed_is_the_median_over_rounds(clock, target):
    engine = FakeEngine(clock, "clearhead", "int8", [(0.5, 0.01), (0.9, 0.02), (0.4, 0.05)])
    (result,) = measure_speed([engine], target, prompt_length=10, num_tokens=5, rounds=3)
    assert result.first_token_seconds == pytest.approx(0.5)
    assert result.prefill_tokens_per_second == pytest.approx(20)
    assert result.tokens_per_second == pytest.approx(50)
    assert result.spread == pytest.approx((0.05 - 0.01) / 0.02)
    assert result.bytes_per_token == 1000 + (10 + 2) * CACHE_ELEMENTS * 2
    assert result.bandwidth_share == pytest.approx(result.bytes_per_token / 0.02 / BANDWIDTH)
    assert result.bandwidth_bytes_per_second == BANDWIDTH


def test_speed_of_reading_a_prompt_only(clock, target):
    engine = FakeEngine(clock, "clearhead", "int8", [(0.5, 9.0), (0.9, 9.0), (0.4, 9.0)])
    (result,) = measure_speed([engine], target, prompt_length=10, num_tokens=1, rounds=3)
    assert (result.tokens_per_second, result.bandwidth_share) == (None, None)
    assert result.prefill_tokens_per_second == pytest.approx(20)
    assert result.spread == pytest.approx(1.0)


def test_engines_alternate_and_start_with_another_one_in_each_round(clock, target):
    engines = [FakeEngine(clock, name, "int8", [(1, 1)] * 3) for name in ("a", "b", "c")]
    descriptions = []
    measure_speed(engines, target, prompt_length=4, num_tokens=2, rounds=3, on_run=descriptions.append)
    runs = sorted((start, engine.name) for engine in engines for start, *_ in engine.runs)
    assert "".join(name for _, name in runs) == "abc" + "abc" + "bca" + "cab"
    gaps = [after - before for (before, _), (after, _) in pairwise(runs[3:])]
    assert min(gaps) >= 2 + measurement.PAUSE_SECONDS  # the threads of the previous engine sleep by then
    assert len(descriptions) == num_runs(engines, 1, 3) == 12
    assert descriptions[3] == "round 1 of 3: a int8"


def test_tokens_are_compared_between_equal_weights(clock, target):
    engines = [
        FakeEngine(clock, "clearhead", "float32", [(1, 1)]),
        FakeEngine(clock, "clearhead", "int8", [(1, 1)], [7, 7, 7, 7]),
        FakeEngine(clock, "huggingface", "float32", [(1, 1)], [0, 1, 9, 3]),
        FakeEngine(clock, "ctranslate2", "int8", [(1, 1)], [7, 7, 7, 7]),
        FakeEngine(clock, "llama.cpp", "int4", [(1, 1)]),
    ]
    results = measure_speed(engines, target, prompt_length=4, num_tokens=4, rounds=1)
    assert [one.tokens_equal_to_ours for one in results] == [None, None, 2, 4, None]
    assert count_equal([], []) == 0


def test_growth_is_compared_with_the_bytes_of_the_cache(clock, target):
    engine = FakeEngine(clock, "clearhead", "int8", [(1, 0.01), (1, 0.03), (1, 0.02), (1, 0.04)])
    short, long = measure_growth([engine], target, contexts=[8, 32], num_tokens=3, rounds=2)
    assert (short.context, long.context) == (8, 32)
    assert short.seconds_per_token == pytest.approx(0.015)
    assert long.seconds_per_token == pytest.approx(0.035)
    assert (short.added_seconds, short.predicted_added_seconds) == (0, 0)
    assert long.added_seconds == pytest.approx(0.02)
    assert long.cache_bytes_per_token - short.cache_bytes_per_token == 24 * CACHE_ELEMENTS * 2
    assert long.predicted_added_seconds == pytest.approx(24 * CACHE_ELEMENTS * 2 / BANDWIDTH)


def test_an_engine_that_stops_early_fails(clock):
    engine = FakeEngine(clock, "clearhead", "int8", [(1, 1)])
    engine.generate = lambda prompt, num_tokens, on_token: on_token(1)
    with pytest.raises(AssertionError, match="generated 1 of 5 tokens"):
        run_engine(engine, [1], 5)
