"""Pages outside of the windows of all layers are given back while a sequence runs."""

import pytest
import torch

from clearhead.architecture import Chunked, Rope, SlidingWindow
from clearhead.engine import Request
from clearhead.errors import ClearheadError
from clearhead.options import SamplingOptions
from tests.engine.toys import check_no_page_is_lost, delay, finished_tokens, plain_tokens, toy_engine
from tests.model.toys import VOCAB, decoder, toy

PATTERNS = {"window": SlidingWindow(size=6), "window of one page": SlidingWindow(size=4), "chunk": Chunked(size=7)}


def network_with(name):
    return toy(decoder(pattern=PATTERNS[name], position=Rope()))


def ask(length, max_new_tokens, seed=0):
    prompt = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Request(prompt=prompt, options=SamplingOptions(max_new_tokens=max_new_tokens))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("is_delayed", [False, True])
def test_a_text_holds_no_more_pages_than_its_window_needs(name, is_delayed):
    network = network_with(name)
    engine = toy_engine(network, num_pages=12, max_tokens=8)
    if is_delayed:
        delay(engine)
    asked = [ask(26, 40), ask(3, 50, seed=1)]  # 65 and 52 tokens, in a pool for 48
    most, events = 0, []
    for request in asked:
        engine.add(request)
    while engine.has_work:
        events += engine.step()
        most = max(most, engine.statistics.num_used_pages)
    tokens, _ = finished_tokens(events)
    assert [tokens[0], tokens[1]] == [plain_tokens(network, request) for request in asked]
    assert most <= 9
    check_no_page_is_lost(engine)


def test_a_cached_prefix_is_found_as_long_as_its_pages_are_there():
    network = network_with("window")
    engine = toy_engine(network, num_pages=30, max_tokens=16)
    first, second = ask(21, 3), ask(21, 6)
    list(engine.run([first]))
    events = list(engine.run([second]))
    assert next(event.prompt.num_cached for event in events if event.prompt) == 20
    assert finished_tokens(events)[0][1] == plain_tokens(network, second)
    check_no_page_is_lost(engine)


def test_a_preempted_text_with_a_window_gets_the_same_tokens():
    network = network_with("window")
    engine = toy_engine(network, num_pages=8, max_tokens=4, max_sequences=3)
    asked = [ask(5 + seed, 20, seed) for seed in range(3)]
    tokens, _ = finished_tokens(engine.run(asked))
    assert [tokens[number] for number in range(3)] == [plain_tokens(network, request) for request in asked]
    check_no_page_is_lost(engine)


def test_without_a_window_in_every_layer_a_long_text_is_refused():
    with pytest.raises(ClearheadError, match="need room for 65 tokens, but the engine has 48"):
        toy_engine(toy(decoder()), num_pages=12, max_tokens=8).add(ask(26, 40))
