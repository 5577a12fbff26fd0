"""The engine of a network is created on first use, kept, and created again when it no longer suits."""

import pytest
import torch

from clearhead.engine import Engine, EngineProvider, Request
from clearhead.engine import provider as provider_module
from clearhead.engine.memory import bytes_per_token, default_memory, pages_for_memory
from clearhead.errors import ClearheadError
from clearhead.options import SamplingOptions
from tests.engine.toys import plain_tokens
from tests.model.toys import decoder, redraw, toy


@pytest.fixture
def network():
    return toy(decoder())


@pytest.fixture(autouse=True)
def small_default(monkeypatch):
    """Give engines 64 kB by default: 256 tokens of the toy network."""
    monkeypatch.setattr(provider_module, "default_memory", lambda device: 2**16)


def request(length=5, max_new_tokens=4):
    return Request(
        prompt=[1 + number % 20 for number in range(length)], options=SamplingOptions(max_new_tokens=max_new_tokens)
    )


def tokens_of(shared, asked):
    request_id = shared.add(asked)
    return [event.token for events in shared.events([request_id]) for event in events]


def test_the_second_call_finds_the_same_engine(network):
    provider = EngineProvider(network)
    assert provider.engine_for([request()]) is provider.engine_for([request(9)])


def test_a_request_that_needs_more_pages_gets_a_larger_engine(network):
    provider = EngineProvider(network)
    small = provider.engine_for([request()])
    asked = request(small.engine.capacity, 3)
    large = provider.engine_for([asked])
    assert large.engine.capacity > small.engine.capacity
    assert tokens_of(large, asked) == plain_tokens(network, asked)


def test_changed_weights_are_not_mixed_with_keys_and_values_of_earlier_calls(network):
    provider, asked = EngineProvider(network), request(80)
    before = tokens_of(provider.engine_for([asked]), asked)
    redraw(network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.neg_()
    after = tokens_of(provider.engine_for([asked]), asked)
    assert after == plain_tokens(network, asked)
    assert after != before


def test_a_network_in_another_precision_gets_another_engine(network):
    provider, asked = EngineProvider(network), request()
    first = provider.engine_for([asked])
    network.float()
    second = provider.engine_for([asked])
    assert second is not first
    assert tokens_of(second, asked) == plain_tokens(network, asked)


def test_has_room_leaves_half_of_the_free_memory(network, monkeypatch):
    provider = EngineProvider(network)
    monkeypatch.setattr(provider_module, "free_memory", lambda device: 2**20)
    tokens_in_half = 2**19 // bytes_per_token(network.config.output_stack, torch.float64)
    assert provider.has_room([request(5, tokens_in_half - 100)])
    assert not provider.has_room([request(5, tokens_in_half + 100)])


def test_too_little_memory_for_a_page_is_an_error(network):
    with pytest.raises(ClearheadError, match="the keys and values of 32 tokens take"):
        pages_for_memory(network.config.output_stack, torch.float64, torch.device("cpu"), 32, memory=100)


def test_the_default_is_a_share_of_the_free_memory():
    assert 0 < default_memory(torch.device("cpu")) <= 2 * 2**30


def test_an_engine_whose_memory_is_no_whole_number_of_pages_is_large_enough_for_the_same_requests(network):
    provider = EngineProvider(network)
    for memory in (2**16, 2**16 + 1, 2**16 + bytes_per_token(network.config.output_stack, torch.float32)):
        engine = Engine(network, memory=memory)
        assert engine.capacity == provider._capacity_for(memory)
