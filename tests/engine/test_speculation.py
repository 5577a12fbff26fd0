"""Speculation inside the batch: rows with drafts and rows without share a step, and the texts do not change."""

from dataclasses import replace

import pytest
import torch

from clearhead.architecture import Rope, SlidingWindow
from clearhead.engine import Request
from clearhead.errors import ClearheadError
from clearhead.generation.sequences import TokenSequence
from clearhead.generation.speculative import DraftModel, PromptLookup, decode_speculatively
from clearhead.options import SamplingOptions
from clearhead.sampling import Draft
from tests.engine.test_engine import requests
from tests.engine.toys import check_no_page_is_lost, delay, finished_tokens, plain_tokens, toy_engine
from tests.model.toys import VOCAB, decoder, toy


@pytest.fixture(scope="module")
def network():
    return toy(decoder())


class Guesses:
    """Draft the right tokens, but a wrong one at every third place."""

    num_tokens = 4

    def __init__(self, network, request):
        self.text = plain_tokens(network, request)

    def draft(self, output, count):
        tokens = self.text[len(output) : len(output) + count]
        return Draft([(token + ((len(output) + n) % 3 == 2)) % VOCAB for n, token in enumerate(tokens)])


class Lookup:
    """Draft by prompt lookup."""

    num_tokens = 5

    def __init__(self, request):
        self.request, self.drafter = request, PromptLookup(num_tokens=5, ngram=2)

    def draft(self, output, count):
        return self.drafter.draft(TokenSequence(self.request.prompt, self.request.options, tokens=list(output)), count)


def with_drafter(request, drafter):
    return Request(prompt=request.prompt, options=request.options, drafter=drafter)


@pytest.mark.parametrize("is_delayed", [False, True])
@pytest.mark.parametrize(("num_pages", "max_tokens"), [(60, 32), (11, 7)])
def test_greedy_texts_do_not_change(network, is_delayed, num_pages, max_tokens):
    engine = toy_engine(network, num_pages, max_tokens=max_tokens)
    if is_delayed:
        delay(engine)
    asked = requests(5, 9, 7, 3, max_new_tokens=14)
    drafters = [Guesses(network, asked[0]), None, Lookup(asked[2]), Guesses(network, asked[3])]
    pairs = zip(asked, drafters, strict=True)
    tokens, reasons = finished_tokens(engine.run([with_drafter(*pair) for pair in pairs]))
    assert [tokens[number] for number in range(4)] == [plain_tokens(network, request) for request in asked]
    assert set(reasons.values()) == {"length"}
    statistics = engine.statistics
    assert statistics.num_drafted_tokens > statistics.num_accepted_tokens > 0
    check_no_page_is_lost(engine)


def test_a_stop_token_in_a_draft_ends_the_text(network):
    places = [
        (request, text, text[place])
        for request in requests(5, 9, 7, 3, 12, 8, max_new_tokens=12)
        for text in [plain_tokens(network, request)]
        for place in range(2, 12)
        if text[place] not in text[:place]
    ]
    asked, text, stop = places[0]
    options = SamplingOptions(max_new_tokens=12, stop_ids=[stop], logprobs=1)
    request = Request(prompt=asked.prompt, options=options, drafter=Guesses(network, asked))
    events = list(toy_engine(network, 40).run([request]))
    assert [event.token for event in events] == text[: text.index(stop) + 1]
    assert events[-1].finish_reason == "stop"
    assert all(event.logprobs is not None for event in events)


def test_windows_and_drafts_work_together():
    network = toy(decoder(pattern=SlidingWindow(size=6), position=Rope()))
    engine = toy_engine(network, num_pages=12, max_tokens=8)
    asked = requests(9, 4, max_new_tokens=40)
    tokens, _ = finished_tokens(engine.run([with_drafter(each, Guesses(network, each)) for each in asked]))
    assert [tokens[0], tokens[1]] == [plain_tokens(network, request) for request in asked]
    check_no_page_is_lost(engine)


@pytest.mark.parametrize("kind", ["lookup", "draft model"])
def test_samples_are_those_of_the_loop_for_one_text(network, kind):
    torch.manual_seed(0)
    small = toy(decoder(num_kv_heads=1))
    options = [SamplingOptions(max_new_tokens=12, temperature=0.8, top_k=12, seed=seed) for seed in range(4)]
    prompts = [request.prompt for request in requests(5, 8, 3, 6)]

    def drafter():
        return PromptLookup(num_tokens=3) if kind == "lookup" else DraftModel(small, num_tokens=3)

    class Adapter:
        num_tokens = 3

        def __init__(self, sequence):
            self.sequence, self.drafter = sequence, drafter()

        @torch.no_grad()
        def draft(self, output, count):
            return self.drafter.draft(replace(self.sequence, tokens=list(output)), count)

    expected = [TokenSequence(*pair) for pair in zip(prompts, options, strict=True)]
    for sequence in expected:
        list(decode_speculatively(network, sequence, drafter()))
    asked = [Request(prompt=each.prompt, options=each.options, drafter=Adapter(each)) for each in expected]
    tokens, _ = finished_tokens(toy_engine(network, 60, max_tokens=64).run(asked))
    assert [tokens[number] for number in range(4)] == [sequence.tokens for sequence in expected]


def test_a_drafter_that_fails_ends_its_own_request_only(network):
    class Failing:
        num_tokens = 2

        def draft(self, output, count):
            raise RuntimeError("injected")

    other, asked = requests(5, 6)
    events = list(toy_engine(network, 40).run([with_drafter(asked, Failing()), other]))
    tokens, reasons = finished_tokens(events)
    assert reasons == {0: "error", 1: "length"}
    assert tokens[1] == plain_tokens(network, other)
    assert "the drafter of this request failed with RuntimeError: injected" in [event.error for event in events]


def test_a_filter_and_a_drafter_exclude_each_other(network):
    request = Request(prompt=[1], options=SamplingOptions(), token_filter=object(), drafter=object())
    with pytest.raises(ClearheadError, match="a request with a token filter cannot use a drafter"):
        toy_engine(network).add(request)
