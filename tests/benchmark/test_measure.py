"""Turns, medians and shares on a clock that is ours: every number is known beforehand."""

from itertools import pairwise

import pytest

from clearhead.api import Model
from clearhead.benchmark import measure as room
from clearhead.benchmark.measure import measure, measure_growth, num_equal, num_steps, take_turn
from clearhead.benchmark.subject import Subject
from tests.benchmark.doubles import Clock, Metronome
from tests.checkpoint.tiny import tiny_network

BANDWIDTH = 1e6  # bytes per second
CACHE_ELEMENTS = 2 * 2 * 2 * 4  # of one token: layers, key-value heads, key and value, head width


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(room, "time", clock)
    monkeypatch.setattr(room, "read_bandwidth", lambda device: BANDWIDTH)
    return clock


@pytest.fixture
def subject(tmp_path):
    return Subject(Model(tiny_network()), None, 64, tmp_path)


def test_medians_over_rounds(clock, subject):
    engine = Metronome(clock, "clearhead", "int8", [(0.5, 0.01), (0.9, 0.02), (0.4, 0.05)])
    (found,) = measure([engine], subject, prompt_length=10, num_tokens=5, rounds=3)
    assert found.first_token_seconds == pytest.approx(0.5)
    assert found.prefill_tokens_per_second == pytest.approx(20)
    assert found.tokens_per_second == pytest.approx(50)
    assert found.spread == pytest.approx((0.05 - 0.01) / 0.02)
    assert found.bytes_per_token == 1000 + (10 + 2) * CACHE_ELEMENTS * 2
    assert found.bandwidth_share == pytest.approx(found.bytes_per_token / 0.02 / BANDWIDTH)
    assert found.bandwidth_bytes_per_second == BANDWIDTH


def test_a_prompt_alone(clock, subject):
    engine = Metronome(clock, "clearhead", "int8", [(0.5, 9.0), (0.9, 9.0), (0.4, 9.0)])
    (found,) = measure([engine], subject, prompt_length=10, num_tokens=1, rounds=3)
    assert (found.tokens_per_second, found.bandwidth_share) == (None, None)
    assert found.prefill_tokens_per_second == pytest.approx(20)
    assert found.spread == pytest.approx(1.0)


def test_engines_take_turns(clock, subject):
    engines = [Metronome(clock, name, "int8", [(1, 1)] * 3) for name in ("a", "b", "c")]
    said = []
    measure(engines, subject, prompt_length=4, num_tokens=2, rounds=3, tell=said.append)
    turns = sorted((start, engine.name) for engine in engines for start, *_ in engine.turns)
    assert "".join(name for _, name in turns) == "abc" + "abc" + "bca" + "cab"
    gaps = [after - before for (before, _), (after, _) in pairwise(turns[3:])]
    assert min(gaps) >= 2 + room.PAUSE_SECONDS  # their threads have gone to sleep
    assert len(said) == num_steps(engines, 1, 3) == 12
    assert said[3] == "round 1 of 3: a int8"


def test_tokens_are_compared_in_the_same_weights(clock, subject):
    engines = [
        Metronome(clock, "clearhead", "float32", [(1, 1)]),
        Metronome(clock, "clearhead", "int8", [(1, 1)], [7, 7, 7, 7]),
        Metronome(clock, "huggingface", "float32", [(1, 1)], [0, 1, 9, 3]),
        Metronome(clock, "ctranslate2", "int8", [(1, 1)], [7, 7, 7, 7]),
        Metronome(clock, "llama.cpp", "int4", [(1, 1)]),
    ]
    found = measure(engines, subject, prompt_length=4, num_tokens=4, rounds=1)
    assert [row.tokens_equal_to_ours for row in found] == [None, None, 2, 4, None]
    assert num_equal([], []) == 0


def test_growth_beside_what_the_cache_adds(clock, subject):
    engine = Metronome(clock, "clearhead", "int8", [(1, 0.01), (1, 0.03), (1, 0.02), (1, 0.04)])
    short, long = measure_growth([engine], subject, contexts=[8, 32], num_tokens=3, rounds=2)
    assert (short.context, long.context) == (8, 32)
    assert short.seconds_per_token == pytest.approx(0.015)
    assert long.seconds_per_token == pytest.approx(0.035)
    assert (short.grown_seconds, short.predicted_seconds) == (0, 0)
    assert long.grown_seconds == pytest.approx(0.02)
    assert long.cache_bytes_per_token - short.cache_bytes_per_token == 24 * CACHE_ELEMENTS * 2
    assert long.predicted_seconds == pytest.approx(24 * CACHE_ELEMENTS * 2 / BANDWIDTH)


def test_an_engine_that_stops_early_is_not_believed(clock):
    engine = Metronome(clock, "clearhead", "int8", [(1, 1)])
    engine.speak = lambda prompt, num_tokens, hear: hear(1)
    with pytest.raises(AssertionError, match="said 1 tokens of 5"):
        take_turn(engine, [1], 5)
