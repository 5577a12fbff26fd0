"""What a request can ask for besides tokens: scores of its prompt, token filters, several samples, and statistics."""

import pytest
import torch

from clearhead.engine import EngineWorker, Request
from clearhead.errors import ClearheadError
from clearhead.generation import TextGenerator
from clearhead.options import SamplingOptions
from clearhead.sampling import SamplingParameters, next_tokens
from tests.engine.test_engine import requests
from tests.engine.toys import (
    check_no_page_is_lost,
    check_prompt_logprobs,
    delay,
    finished_tokens,
    plain_tokens,
    toy_engine,
)
from tests.model.toys import VOCAB, decoder, toy


@pytest.fixture(scope="module")
def network():
    return toy(decoder())


def ask(prompt, max_new_tokens=4, **fields):
    return Request(prompt=prompt, options=SamplingOptions(max_new_tokens=max_new_tokens), **fields)


def prompt_of(length, seed=0):
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# --- log-probabilities of prompts


@pytest.mark.parametrize("max_tokens", [5, 64])
@pytest.mark.parametrize("max_new_tokens", [0, 3])
def test_a_prompt_is_scored_in_parts_as_in_one_forward_pass(network, max_tokens, max_new_tokens):
    engine = toy_engine(network, num_pages=40, max_tokens=max_tokens)
    asked = [ask(prompt_of(length, length), max_new_tokens, prompt_logprobs=2) for length in (1, 2, 17, 26)]
    events = list(engine.run(asked))
    reports = {event.request_id: event.prompt for event in events if event.prompt is not None}
    assert sorted(reports) == [0, 1, 2, 3]
    for number, request in enumerate(asked):
        check_prompt_logprobs(network, request, reports[number].logprobs)
    tokens, reasons = finished_tokens(events)
    assert set(reasons.values()) == {"length"}
    assert [len(tokens[number]) for number in range(4)] == [max_new_tokens] * 4
    check_no_page_is_lost(engine)


def test_cached_prefixes_are_not_skipped_where_scores_are_needed(network):
    engine = toy_engine(network, num_pages=40, max_tokens=64)
    prompt = prompt_of(17)
    reports = []
    for num_top in (None, 2, None):
        request = ask(prompt, prompt_logprobs=num_top)
        (report,) = [event.prompt for event in engine.run([request]) if event.prompt is not None]
        check_prompt_logprobs(network, request, report.logprobs)
        reports.append(report.num_cached)
    assert reports == [0, 0, 16]


def test_a_preempted_prompt_is_scored_once(network):
    engine = toy_engine(network, num_pages=11, max_tokens=6)
    asked = [ask(prompt_of(20, seed), 12, prompt_logprobs=1) for seed in range(3)]
    events = list(engine.run(asked))
    assert engine.statistics.num_preemptions > 0
    for event in events:
        if event.prompt is not None:
            check_prompt_logprobs(network, asked[event.request_id], event.prompt.logprobs)
    assert sum(event.prompt is not None for event in events) == 3


# --- token filters


class EvenThenOdd:
    """Allow even and odd tokens in turn."""

    def __init__(self, as_bits=False, state=0):
        self.as_bits, self.state = as_bits, state

    def allowed_tokens(self):
        mask = torch.arange(VOCAB) % 2 == self.state % 2
        if not self.as_bits:
            return mask
        return torch.tensor([int(sum(2**n for n in range(VOCAB) if mask[n]))], dtype=torch.int32)

    def accept(self, token):
        assert token % 2 == self.state % 2
        self.state += 1

    def fork(self):
        return EvenThenOdd(self.as_bits, self.state)


def plain_filtered_tokens(network, request, token_filter):
    """Return the tokens of the loop without a cache, with the logits of forbidden tokens set to -inf."""
    options, output = request.options, []
    parameters = SamplingParameters.from_options([options], VOCAB)
    while len(output) < options.max_new_tokens:
        with torch.no_grad():
            logits = network(torch.tensor([[*request.prompt, *output]]))[:, -1].float()
        logits[0, ~token_filter.allowed_tokens()] = -torch.inf
        output.append(int(next_tokens(logits, parameters, torch.tensor([len(output)]))))
        token_filter.accept(output[-1])
    return output


@pytest.mark.parametrize("as_bits", [False, True])
@pytest.mark.parametrize("is_delayed", [False, True])
def test_a_filter_rules_out_tokens_and_the_others_go_on(network, as_bits, is_delayed):
    engine = toy_engine(network, num_pages=40, max_tokens=8)
    if is_delayed:
        delay(engine)
    options = [SamplingOptions(max_new_tokens=8), SamplingOptions(max_new_tokens=8, temperature=1.0, top_p=0.9, seed=5)]
    filtered = [Request(prompt=prompt_of(6), options=each, token_filter=EvenThenOdd(as_bits)) for each in options]
    others = requests(5, 9)
    tokens, _ = finished_tokens(engine.run([filtered[0], others[0], filtered[1], others[1]]))
    assert [tokens[1], tokens[3]] == [plain_tokens(network, request) for request in others]
    assert [tokens[0], tokens[2]] == [plain_filtered_tokens(network, request, EvenThenOdd()) for request in filtered]


def test_a_preempted_request_keeps_the_state_of_its_filter(network):
    engine = toy_engine(network, num_pages=7, max_tokens=16)
    asked = [ask(prompt_of(5 + seed, seed), 12, token_filter=EvenThenOdd()) for seed in range(3)]
    tokens, _ = finished_tokens(engine.run(asked))
    assert engine.statistics.num_preemptions > 0
    assert [tokens[n] for n in range(3)] == [plain_filtered_tokens(network, each, EvenThenOdd()) for each in asked]


class BadFilter(EvenThenOdd):
    """Return a given value, or raise a given exception, from the third token on."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def allowed_tokens(self):
        if self.state < 2:
            return None
        if isinstance(self.value, Exception):
            raise self.value
        return self.value

    def accept(self, token):
        self.state += 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(VOCAB, dtype=torch.bool), "the token filter of this request allows no token"),
        (torch.ones(3, dtype=torch.bool), "it must return 29 bools or 1 int32"),
        (RuntimeError("injected"), "the token filter of this request failed with RuntimeError: injected"),
    ],
)
def test_a_filter_at_fault_ends_its_own_request_only(network, value, message):
    engine = toy_engine(network, num_pages=40)
    (other,) = requests(5)
    events = list(engine.run([ask([1, 2], 8, token_filter=BadFilter(value)), other]))
    tokens, reasons = finished_tokens(events)
    assert reasons == {0: "error", 1: "length"}
    assert len(tokens[0]) == 2
    assert message in next(event.error for event in events if event.error)
    assert tokens[1] == plain_tokens(network, other)
    check_no_page_is_lost(engine)


def test_a_filter_that_refuses_the_chosen_token_ends_its_own_request_only(network):
    class Refusing(EvenThenOdd):
        def accept(self, token):
            raise ValueError("no such token")

    engine = toy_engine(network, num_pages=40)
    (other,) = requests(5)
    events = list(engine.run([ask([1, 2], token_filter=Refusing()), other]))
    assert [event.error for event in events if event.error] == [
        "the token filter of this request failed with ValueError: no such token"
    ]
    assert finished_tokens(events)[0][1] == plain_tokens(network, other)


def test_a_filter_that_only_allows_to_stop_too_early_is_an_error(network):
    class Ending(EvenThenOdd):
        def allowed_tokens(self):
            return torch.arange(VOCAB) == 3

    options = SamplingOptions(max_new_tokens=8, min_new_tokens=2, stop_ids=[3])
    (event,) = toy_engine(network).run([Request(prompt=[1], options=options, token_filter=Ending())])
    assert event.error.endswith("ends the text after 0 tokens, but min_new_tokens is 2; ask for fewer")


# --- several texts of one prompt


def test_samples_are_those_of_generate(network):
    options = {"max_new_tokens": 6, "temperature": 1.0, "seed": 2**63 - 2}
    request = Request(prompt=prompt_of(9), options=SamplingOptions(**options), token_filter=EvenThenOdd())
    expected = TextGenerator(network, None, {}).generate([request.prompt], 3, options)
    asked = request.samples(3)
    assert len({id(each.token_filter) for each in asked}) == 3
    plain = [Request(prompt=each.prompt, options=each.options) for each in asked]
    tokens, _ = finished_tokens(toy_engine(network, num_pages=40).run(plain))
    assert [tokens[number] for number in range(3)] == [each.tokens for each in expected]


# --- statistics


def test_statistics_count_requests_pages_and_tokens(network):
    engine = toy_engine(network, num_pages=40, max_sequences=2, max_tokens=16)
    for request in (ask(prompt_of(9)), ask(prompt_of(9)), ask([1, 2, 3])):
        engine.add(request)
    assert (engine.statistics.num_waiting, engine.statistics.num_running) == (3, 0)
    engine.step()
    now = engine.statistics
    assert (now.num_running + now.num_waiting, now.num_used_pages > 0) == (3, True)
    while engine.has_work:
        engine.step()
    after = engine.statistics
    assert (after.num_running, after.num_waiting, after.num_used_pages, after.num_pages) == (0, 0, 0, 40)
    assert (after.num_prompt_tokens, after.num_cached_tokens, after.num_generated_tokens) == (21, 8, 12)
    assert after.num_cached_pages > 0


def test_the_worker_counts_requests_that_it_has_not_seen_yet(network):
    engine = toy_engine(network, num_pages=40)
    with EngineWorker(engine) as worker:
        streams = [worker.submit(request) for request in requests(3, 4, 5, 6, 7)]
        now = worker.statistics
        assert now.num_running + now.num_waiting >= 1
        assert sum(len(list(stream)) for stream in streams) == 30
        assert worker.statistics.num_generated_tokens == 30


# --- requests that make no sense


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ["a"]}, "the prompt contains 'a'; a token id is a whole number"),
        ({"prompt": [1.5]}, "the prompt contains 1.5"),
        ({"prompt": [1], "prompt_logprobs": -1}, "prompt_logprobs is -1; it must be a whole number, 0 or more"),
        ({"prompt": [1], "salt": "key"}, "the salt is 'key'; it must be bytes"),
    ],
)
def test_a_bad_request_gets_one_error(network, fields, message):
    engine = toy_engine(network)
    with pytest.raises(ClearheadError, match=message):
        engine.add(Request(options=SamplingOptions(), **fields))
    with EngineWorker(engine) as worker:
        (event,) = worker.submit(Request(options=SamplingOptions(), **fields))
        assert message in event.error
        assert len(list(worker.submit(requests(3)[0]))) == 6


def test_a_request_that_cannot_even_be_checked_does_not_end_the_worker(network):
    with EngineWorker(toy_engine(network)) as worker:
        (event,) = worker.submit(None)
        assert event.error.startswith("this request failed with AttributeError")
        assert len(list(worker.submit(requests(3)[0]))) == 6
