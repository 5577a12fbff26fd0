"""Test the clients of `clearhead bench serve`, the rounds and the summary, with an engine whose times are known."""

from collections import deque
from dataclasses import replace

import pytest

from clearhead.benchmark import measurement, serving, serving_load
from clearhead.benchmark.clearhead_serving import ClearheadServing
from clearhead.benchmark.huggingface_serving import HuggingFaceServing
from clearhead.benchmark.serving import measure_serving, num_serving_runs
from clearhead.benchmark.serving_engine import ServingEngine
from clearhead.benchmark.serving_load import Load, run_load
from clearhead.benchmark.serving_result import percentile
from clearhead.errors import ClearheadError
from tests.benchmark.doubles import FakeClock


class FakeServing(ServingEngine):
    """Gives every request one token per step of `step` seconds; at most `slots` requests run."""

    def __init__(self, clock, name="clearhead", weights="int8", step=1.0, slots=100):
        self.clock, self.name, self.weights, self.step, self.slots = clock, name, weights, step, slots
        self.running, self.waiting, self.log = {}, deque(), []
        self.most_at_once, self.extra_tokens, self.times = 0, 0, {}

    def open(self, concurrency, capacity):
        self.log.append(("open", concurrency, capacity))

    def send(self, number, prompt, num_tokens):
        self.log.append(("send", number, tuple(prompt)))
        self.waiting.append((number, num_tokens))
        self.most_at_once = max(self.most_at_once, len(self.waiting) + len(self.running))

    def wait(self):
        while self.waiting and len(self.running) < self.slots:
            number, num_tokens = self.waiting.popleft()
            self.running[number] = num_tokens
        self.clock.now += self.step
        for number in self.running:
            self.times.setdefault(number, []).append(self.clock.now)
        finished = [number for number, left in self.running.items() if left == 1]
        self.running = {number: left - 1 for number, left in self.running.items() if left > 1}
        return finished

    def take_token_times(self):
        taken, self.times = self.times, {}
        return {number: (times * 3)[: len(times) + self.extra_tokens] for number, times in taken.items()}

    def close(self):
        self.log.append(("close",))


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    for module in (serving, serving_load, measurement):
        monkeypatch.setattr(module, "time", clock)
    return clock


def prompts_of(engine):
    return [entry[2] for entry in engine.log if entry[0] == "send"]


# --- clients


def test_each_client_sends_its_next_request_when_the_last_one_is_finished(clock):
    engine = FakeServing(clock, step=0.5)
    run = run_load(engine, [[1], [2], [3], [4], [5]], concurrency=2, num_tokens=4)
    assert engine.most_at_once == 2
    assert [entry[1] for entry in engine.log] == [0, 1, 2, 3, 4]
    assert run.seconds == 3 * 4 * 0.5  # two, two, and one request of four steps each
    assert run.num_tokens == 20
    assert run.first_token_seconds == [0.5] * 5
    assert run.token_seconds == [0.5] * 15


def test_the_time_to_the_first_token_includes_the_time_in_the_queue(clock):
    run = run_load(FakeServing(clock, slots=1), [[1], [2]], concurrency=2, num_tokens=3)
    assert run.first_token_seconds == [1.0, 4.0]
    assert run.tokens_per_second == 6 / 6


@pytest.mark.parametrize("extra_tokens", [-1, 5])
def test_an_engine_that_generates_another_number_of_tokens_is_an_error(clock, extra_tokens):
    engine = FakeServing(clock)
    engine.extra_tokens = extra_tokens
    with pytest.raises(ClearheadError, match=f"generated {4 + extra_tokens} tokens for a request instead of 4"):
        run_load(engine, [[1]], concurrency=1, num_tokens=4)


def test_no_two_prompts_begin_alike_without_a_shared_prefix():
    load = Load(concurrency=4, num_requests=50, prompt_length=16)
    first, second = (load.prompts(1000, seed) for seed in ("1", "2"))
    assert first == load.prompts(1000, "1")
    assert {len(prompt) for prompt in first} == {16}
    assert len({tuple(prompt[:4]) for prompt in first + second}) == 100
    assert all(0 <= token < 1000 for prompt in first for token in prompt)


def test_a_shared_prefix_is_that_of_one_round():
    load = Load(concurrency=4, num_requests=8, prompt_length=16, num_tokens=5, shared_prefix=32)
    first, second = (load.prompts(1000, seed) for seed in ("1", "2"))
    assert len({tuple(prompt[:32]) for prompt in first}) == 1
    assert first[0][:32] != second[0][:32]
    assert len({tuple(prompt[32:36]) for prompt in first}) == 8
    assert {len(prompt) for prompt in first} == {48}
    assert load.capacity == 53


def test_percentiles_are_values_that_occurred():
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, percent) for percent in (0, 20, 21, 50, 99, 100)] == [1, 1, 2, 3, 5, 5]
    assert percentile([float(value) for value in range(1, 201)], 99) == 198


# --- rounds

LOAD = Load(concurrency=2, num_requests=6, prompt_length=3, num_tokens=5)


def test_engines_get_the_same_prompts_in_turns(clock):
    engines = [FakeServing(clock, name) for name in ("clearhead", "llama.cpp")]
    announced = []
    measure_serving(engines, [LOAD], 100, 2, print, announced.append)
    assert prompts_of(engines[0]) == prompts_of(engines[1])
    assert len(set(prompts_of(engines[0]))) == 2 + 2 * 6  # the warm-up has two requests
    assert announced == [
        "clearhead int8, 2 clients: opening",
        "llama.cpp int8, 2 clients: opening",
        "clearhead int8, 2 clients: warming up",
        "llama.cpp int8, 2 clients: warming up",
        "clearhead int8, 2 clients: round 1 of 2",
        "llama.cpp int8, 2 clients: round 1 of 2",
        "llama.cpp int8, 2 clients: round 2 of 2",
        "clearhead int8, 2 clients: round 2 of 2",
    ]
    assert num_serving_runs(engines, [LOAD], 2) == len(announced)


def test_results_are_medians_over_rounds_and_ratios_are_taken_within_a_round(clock):
    ours, theirs = FakeServing(clock, "clearhead"), FakeServing(clock, "llama.cpp")
    speeds = {"clearhead": iter([1, 0.5, 1.0, 0.25]), "llama.cpp": iter([1, 1.0, 4.0, 2.0])}  # the first warms up
    for engine in (ours, theirs):
        send = engine.send

        def send_at_another_speed(number, prompt, num_tokens, engine=engine, send=send):
            engine.step = next(speeds[engine.name]) if number == 0 else engine.step
            send(number, prompt, num_tokens)

        engine.send = send_at_another_speed
    one, other = measure_serving([ours, theirs], [LOAD], 100, 3, print)
    assert (one.engine, one.weights, one.concurrency, one.num_requests) == ("clearhead", "int8", 2, 6)
    assert one.tokens_per_second == 2 / 0.5
    assert one.requests_per_second == 2 / 0.5 / 5
    assert one.spread == (2 / 0.25 - 2 / 1) / (2 / 0.5)
    assert (one.first_token_p50, one.first_token_p99, one.between_tokens_p50, one.between_tokens_p99) == (0.5,) * 4
    assert (one.first_request_seconds, one.later_request_seconds) == (0.5, 0.5)
    assert one.clearhead_ratio is None
    assert other.clearhead_ratio == 4  # 2, 4 and 8
    assert other.clearhead_ratio_range == (2, 8)


def test_without_later_requests_their_time_is_unknown(clock):
    (result,) = measure_serving([FakeServing(clock)], [replace(LOAD, num_requests=2)], 100, 1, print)
    assert result.later_request_seconds is None


def test_engines_of_other_weights_are_closed_before(clock):
    log = []
    engines = [FakeServing(clock, "clearhead", "int8"), FakeServing(clock, "clearhead", "int4")]
    for engine in engines:
        engine.open = lambda *size, engine=engine: log.append(("open", engine.weights, *size))
        engine.close = lambda engine=engine: log.append(("close", engine.weights))
    loads = [LOAD, replace(LOAD, concurrency=3)]
    results = measure_serving(engines, loads, 100, 1, print)
    assert [(result.weights, result.concurrency) for result in results] == [
        ("int8", 2), ("int8", 3), ("int4", 2), ("int4", 3),
    ]  # fmt: skip
    assert log == [
        ("open", "int8", 2, 8), ("open", "int8", 3, 8), ("close", "int8"),
        ("open", "int4", 2, 8), ("open", "int4", 3, 8), ("close", "int4"),
    ]  # fmt: skip


def test_an_engine_that_does_not_open_is_skipped_and_notes_come_once(clock):
    def refuse(concurrency, capacity):
        raise ClearheadError("this is a test")

    ours, theirs = FakeServing(clock, "clearhead"), FakeServing(clock, "llama.cpp")
    ours.note, theirs.open = "is slow", refuse
    notes = []
    results = measure_serving([ours, theirs], [LOAD, replace(LOAD, num_requests=7)], 100, 1, notes.append)
    assert [result.engine for result in results] == ["clearhead", "clearhead"]
    assert notes == ["clearhead int8 is slow", "skipped llama.cpp int8 with 2 clients: this is a test"]
    with pytest.raises(ClearheadError, match="no engine can run this model here"):
        measure_serving([theirs], [LOAD], 100, 1, notes.append)


def test_engines_are_closed_after_an_error(clock):
    engine = FakeServing(clock)

    def fail():
        raise KeyboardInterrupt

    engine.wait = fail
    with pytest.raises(KeyboardInterrupt):
        measure_serving([engine], [LOAD], 100, 1, print)
    assert engine.log[-1] == ("close",)


# --- the engines in this process


@pytest.mark.parametrize(
    ("engine_class", "weights"),
    [(ClearheadServing, "float32"), (ClearheadServing, "int8"), (HuggingFaceServing, "float32")],
)
def test_every_request_gets_its_tokens(engine_class, weights, target):
    engine = engine_class(target, weights)
    load = Load(concurrency=3, num_requests=7, prompt_length=6, num_tokens=9, shared_prefix=40)
    try:
        for concurrency in (3, 5):
            engine.open(concurrency, load.capacity)
            run = run_load(engine, load.prompts(target.model.config.vocab_size, "a"), concurrency, load.num_tokens)
            assert len(run.first_token_seconds) == 7
            assert len(run.token_seconds) == 7 * 8
            assert min(run.first_token_seconds) > 0
    finally:
        engine.close()
    engine.close()


def test_clearhead_reuses_the_shared_prefix(target):
    engine = ClearheadServing(target, "float32")
    engine.open(2, 80)
    prompts = Load(1, 2, prompt_length=6, shared_prefix=64).prompts(96, "a")
    engine.send(0, prompts[0], 2)
    while engine.engine.has_work:
        engine.wait()
    engine.send(1, prompts[1], 2)
    (item,) = engine.engine.scheduler.schedule().items
    assert (item.start, item.stop) == (64, 70)


def test_a_request_that_fails_ends_the_benchmark(target, monkeypatch):
    engine = ClearheadServing(target, "float32")
    engine.open(1, 80)
    engine.send(0, [1, 2, 3], 4)
    monkeypatch.setattr(engine.engine, "step", lambda: engine.engine.abort_all("this is a test"))
    with pytest.raises(ClearheadError, match="clearhead float32 failed: this is a test"):
        engine.wait()
