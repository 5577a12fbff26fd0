"""The engine against generation without a cache: random arrivals, options, aborts, preemptions and shared prefixes."""

from copy import deepcopy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clearhead.backends import accelerate
from clearhead.engine import Request
from clearhead.errors import ClearheadError
from clearhead.families import preset, presets
from clearhead.options import SamplingOptions
from tests.engine.toys import (
    check_no_page_is_lost,
    check_prompt_logprobs,
    delay,
    finished_tokens,
    plain_tokens,
    toy_engine,
)
from tests.model.toys import POSITIONS, VOCAB, decoder, toy
from tests.toy_presets import shrink

ARCHITECTURES = {shrink(preset(name)): name for name in presets()}  # at toy size, many presets are the same network
MODELS = {
    name: config for config, name in ARCHITECTURES.items() if config.decoder and config.head and not config.reads_audio
}
MODELS |= {f"toy with {name}": decoder(position=position) for name, position in POSITIONS.items()}
LENGTHS = st.integers(1, 9)
TOKENS = st.integers(0, VOCAB - 1)


@st.composite
def sampling_options(draw):
    """Greedy or sampled, with any of the filters, penalties and stops."""
    temperature = draw(st.sampled_from([0.0, 0.7, 1.3]))
    return SamplingOptions(
        max_new_tokens=draw(st.integers(1, 8)),
        min_new_tokens=draw(st.integers(0, 1)),
        temperature=temperature,
        seed=draw(st.integers(0, 2**40)),
        top_k=draw(st.sampled_from([None, 3])),
        top_p=draw(st.sampled_from([None, 0.8])),
        min_p=draw(st.sampled_from([None, 0.1])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
        logit_bias=draw(st.sampled_from([(), ((3, 2.0),)])),
        stop_ids=draw(st.lists(TOKENS, max_size=2)),
    )


@st.composite
def workloads(draw, has_encoder):
    """Requests with the step at which each arrives and, for some, the step at which it is aborted."""
    shared = draw(st.lists(TOKENS, min_size=8, max_size=12))
    workload = []
    for _ in range(draw(st.integers(1, 6))):
        own = draw(st.lists(TOKENS, min_size=1, max_size=9))
        prompt = own if has_encoder or not draw(st.booleans()) else shared[: draw(st.integers(0, len(shared)))] + own
        source = draw(st.lists(TOKENS, min_size=1, max_size=9)) if has_encoder else ()
        num_top = draw(st.sampled_from([None, None, 0, 3]))
        request = Request(prompt=prompt, options=draw(sampling_options()), source=source, prompt_logprobs=num_top)
        aborted_at = draw(st.one_of(st.none(), st.none(), st.integers(0, 8)))
        workload.append((request, draw(st.integers(0, 6)), aborted_at))
    return workload


def run_workload(engine, workload):
    """Return all events, and the request ids in the order of the workload."""
    events, ids, time = [], {}, 0
    while len(ids) < len(workload) or engine.has_work:
        for number, (request, arrival, aborted_at) in enumerate(workload):
            if arrival == time:
                ids[number] = engine.add(request)
            if aborted_at == time and number in ids:
                engine.abort(ids[number])
        events += engine.step()
        time += 1
        assert time < 500, "the engine makes no progress"
    return events, [ids[number] for number in range(len(workload))]


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_request_gets_the_tokens_of_the_loop_without_a_cache(name, data):
    check_random_schedule(_networks(name), data)


@pytest.mark.slow  # with the 3 above for each model, thousands of schedules
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_request_gets_the_tokens_of_the_loop_without_a_cache_in_many_schedules(name, data):
    check_random_schedule(_networks(name), data)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["llama-3.1-8b", "transformer-base", "t5-small"])
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_request_gets_the_same_tokens_in_the_cpu_kernels(name, data):
    network = deepcopy(_networks(ARCHITECTURES[shrink(preset(name))])).float()
    fast = deepcopy(network)
    assert accelerate(fast)
    check_random_schedule(network, data, fast, page_size=16)


def check_random_schedule(network, data, in_engine=None, page_size=4):
    """Compare a random schedule in the engine with generation without a cache."""
    engine = toy_engine(
        in_engine or network,
        num_pages=data.draw(st.integers(8, 40), "pages"),
        page_size=page_size,
        max_tokens=data.draw(st.integers(4, 20), "max_tokens"),
    )
    if data.draw(st.booleans(), "tokens are known one step later"):
        delay(engine)
    workload = data.draw(workloads(network.config.is_encoder_decoder), "workload")
    events, ids = run_workload(engine, workload)
    tokens, reasons = finished_tokens(events)
    for (request, _, _), request_id in zip(workload, ids, strict=True):
        expected = plain_tokens(network, request)
        if reasons[request_id] == "aborted":
            assert tokens[request_id] == expected[: len(tokens[request_id])]
        else:
            assert tokens[request_id] == expected
    reports = {event.request_id: event.prompt for event in events if event.prompt is not None}
    for (request, _, _), request_id in zip(workload, ids, strict=True):
        if request_id in reports:
            check_prompt_logprobs(network, request, reports[request_id].logprobs)
    check_no_page_is_lost(engine)


_CACHE = {}


def _networks(name):
    if name not in _CACHE:
        _CACHE[name] = toy(MODELS[name])
    return _CACHE[name]


@pytest.fixture
def network():
    return toy(decoder())


def requests(*lengths, max_new_tokens=6):
    generator = torch.Generator().manual_seed(0)
    return [
        Request(
            prompt=torch.randint(0, VOCAB, (length,), generator=generator).tolist(),
            options=SamplingOptions(max_new_tokens=max_new_tokens),
        )
        for length in lengths
    ]


def test_preempted_requests_get_the_same_tokens(network):
    engine = toy_engine(network, num_pages=7, max_tokens=16)
    asked = requests(5, 6, 7, max_new_tokens=12)
    preempted = []
    original = engine.scheduler._preempt
    engine.scheduler._preempt = lambda sequence: (preempted.append(sequence.request_id), original(sequence))
    tokens, _ = finished_tokens(engine.run(asked))
    assert preempted, "the pool is too small for all three"
    assert 0 not in preempted, "the oldest request is never preempted for a younger one"
    assert [tokens[number] for number in range(3)] == [plain_tokens(network, request) for request in asked]
    check_no_page_is_lost(engine)


def test_a_shared_prefix_is_computed_once(network):
    engine = toy_engine(network, num_pages=30, max_tokens=64, max_sequences=8)
    prefix = requests(16)[0].prompt
    asked = [Request(prompt=[*prefix, number], options=SamplingOptions(max_new_tokens=3)) for number in range(6)]
    read = []
    original = engine.executor.runner.run
    object.__setattr__(
        engine.executor.runner, "run", lambda batch: (read.append(len(batch.tokens)), original(batch))[1]
    )
    tokens, _ = finished_tokens(engine.run(asked))
    assert sum(read) == 17 + 5 + 6 * 2  # the first prompt, the last token of five others, two more tokens of each
    assert [tokens[number] for number in range(6)] == [plain_tokens(network, request) for request in asked]


def test_requests_with_different_salts_share_no_pages(network):
    engine = toy_engine(network, num_pages=30)
    (asked,) = requests(16)
    list(engine.run([asked]))
    table = engine.scheduler.pool.create_table(asked.prompt, b"another tenant")
    assert table.num_tokens == 0


def test_a_long_prompt_is_read_in_parts_while_others_generate(network):
    engine = toy_engine(network, num_pages=30, max_tokens=6, max_sequences=4)
    short, long = requests(3, 26)
    engine.add(short)
    engine.step()
    engine.add(long)
    first_events = [event.request_id for _ in range(4) for event in engine.step()]
    assert first_events == [0, 0, 0, 0]  # the short one gets a token in every step


# --- bad requests


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(network):
    engine = toy_engine(network, num_pages=4, page_size=4)
    with pytest.raises(
        ClearheadError, match="a prompt of 10 tokens and 20 new ones need room for 29 tokens, but the engine has 16"
    ):
        engine.add(requests(10, max_new_tokens=20)[0])
    assert not engine.has_work


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(prompt=[], options=SamplingOptions()), "the text is empty"),
        (Request(prompt=[VOCAB], options=SamplingOptions()), "token id 29 is out of range"),
        (Request(prompt=[1], options=SamplingOptions(), source=[1]), "no encoder"),
        (Request(prompt=[1], options=SamplingOptions(logit_bias={99: 1.0})), "logit_bias contains token 99"),
    ],
)
def test_a_bad_request_is_refused_and_the_engine_stays_usable(network, request_, message):
    engine = toy_engine(network)
    with pytest.raises(ClearheadError, match=message):
        engine.add(request_)
    tokens, _ = finished_tokens(engine.run(requests(3)))
    assert len(tokens[max(tokens)]) == 6


def test_a_request_for_no_tokens_finishes_at_once(network):
    engine = toy_engine(network)
    events = list(engine.run([Request(prompt=[1], options=SamplingOptions(max_new_tokens=0))]))
    assert [(event.token, event.finish_reason) for event in events] == [(None, "length")]


def test_abort_of_an_unknown_or_finished_request_returns_false(network):
    engine = toy_engine(network)
    assert not engine.abort(7)
    list(engine.run(requests(3)))
    assert not engine.abort(0)


def test_a_failing_request_ends_alone(network):
    engine = toy_engine(network, num_pages=30, max_tokens=64)
    asked = requests(5, 6, 7)
    original = engine.executor.runner.run

    def run(batch):
        if any(sequence.request_id == 1 and len(sequence.output) == 2 for sequence in batch.sampled):
            raise RuntimeError("injected")
        return original(batch)

    object.__setattr__(engine.executor.runner, "run", run)
    events = list(engine.run(asked))
    tokens, reasons = finished_tokens(events)
    assert reasons == {0: "length", 1: "error", 2: "length"}
    assert tokens[0] == plain_tokens(network, asked[0])
    assert tokens[2] == plain_tokens(network, asked[2])
    assert [event.error for event in events if event.error] == [
        "computing this request failed with RuntimeError: injected"
    ]
    check_no_page_is_lost(engine)


def test_logits_that_are_not_finite_end_their_request_only(network):
    engine = toy_engine(network, num_pages=30, max_tokens=64)
    asked = requests(5, 6)
    original = engine.executor.runner.run

    def run(batch):
        hidden = original(batch)
        for row, sequence in zip(batch.sampled_rows, batch.sampled, strict=True):
            if sequence.request_id == 1:
                hidden[row] = torch.nan
        return hidden

    object.__setattr__(engine.executor.runner, "run", run)
    tokens, reasons = finished_tokens(engine.run(asked))
    assert reasons == {0: "length", 1: "error"}
    assert tokens[0] == plain_tokens(network, asked[0])


def test_an_interrupted_step_can_be_repeated(network):
    engine = toy_engine(network, num_pages=30, max_tokens=64)
    asked = requests(5, 6)
    for request in asked:
        engine.add(request)
    events = engine.step()
    original = engine.executor.runner.run

    def interrupt(batch):
        raise KeyboardInterrupt

    object.__setattr__(engine.executor.runner, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    object.__setattr__(engine.executor.runner, "run", original)
    while engine.has_work:
        events += engine.step()
    tokens, _ = finished_tokens(events)
    assert [tokens[0], tokens[1]] == [plain_tokens(network, request) for request in asked]


def test_a_model_that_cannot_be_batched_is_refused():
    with pytest.raises(ClearheadError, match="the engine cannot run this model"):
        toy_engine(toy(shrink(preset("bert-base"))))
