"""Deterministic mode: tokens and log-probabilities have the same bits alone, among others, preempted and in parts."""

import pytest
import torch

from clearhead.api import Model
from clearhead.backends import accelerate, pack_network
from clearhead.engine import Request
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.model import Transformer
from clearhead.options import SamplingOptions
from tests.engine.toys import check_no_page_is_lost, toy_engine
from tests.model.toys import VOCAB, decoder, redraw
from tests.toy_presets import shrink

SLOW = ("deepseek-v3", "qwen3-30b-a3b", "t5-small", "gemma-3-1b")
FAMILIES = ["bloom-560m", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


def network_of(config, dtype=torch.float32):
    network = Transformer(config)
    redraw(network)
    return network.to(dtype).eval()


def asked_for(config, count=5):
    """Return requests of different lengths and options; the last has the prompt of the first."""
    generator = torch.Generator().manual_seed(1)

    def tokens(length):
        return torch.randint(0, min(VOCAB, config.vocab_size), (length,), generator=generator).tolist()

    requests = []
    for number in range(count - 1):
        sampling = {"temperature": 1.1, "top_p": 0.9, "seed": number} if number % 2 else {}
        options = SamplingOptions(max_new_tokens=10, logprobs=2, **sampling)
        source = tokens(4 + number) if config.is_encoder_decoder else ()
        prompt = tokens(1) if config.is_encoder_decoder else tokens(18 - 3 * number)
        requests.append(Request(prompt=prompt, options=options, source=source, prompt_logprobs=2))
    first = requests[0]
    return [*requests, Request(prompt=first.prompt, options=first.options, source=first.source)]


def bits_of(engine, requests, arrivals=None):
    """Return everything that is reported of each request; the n-th arrives at step n if `arrivals` says so."""
    waiting, events = list(requests), []
    if arrivals is None:
        events = list(engine.run(waiting))
    else:
        while waiting or engine.has_work:
            for _ in range(arrivals):
                if waiting:
                    engine.add(waiting.pop(0))
            events += engine.step()
    numbers = {}
    for event in events:
        assert event.error is None
        found = numbers.setdefault(event.request_id, [])
        for logprobs in (event.prompt.logprobs if event.prompt else None, event.logprobs):
            if logprobs is not None:
                parts = (logprobs.chosen, logprobs.top, logprobs.top_ids)
                found += [part.double().flatten() for part in parts]
        found.append(torch.tensor([event.token]).double())
    check_no_page_is_lost(engine)
    return [torch.cat(numbers[key]) for key in sorted(numbers)]


def check_same_bits(network, deterministic, page_size):
    requests = asked_for(network.config)
    expected = [
        bits_of(toy_engine(network, 40, page_size, 99, 8, deterministic=deterministic), [request])[0]
        for request in requests
    ]
    roomy = toy_engine(network, 60, page_size, 7, 5, deterministic=deterministic)
    scarce = toy_engine(network, 2 + 28 // page_size, page_size, 16, 5, deterministic=deterministic)
    for engine, arrivals in ((roomy, None), (scarce, 1), (roomy, 2)):  # the last run finds cached prefixes
        for found, alone in zip(bits_of(engine, requests, arrivals), expected, strict=True):
            assert torch.equal(found, alone)
    return scarce.statistics.num_preemptions


@pytest.mark.parametrize("name", FAMILIES)
def test_modules_give_each_request_the_bits_that_it_gets_alone(name):
    network = network_of(shrink(preset(name)))
    assert not toy_engine(network).deterministic
    num_preemptions = check_same_bits(network, True, 4)
    assert num_preemptions > 0 or network.config.is_encoder_decoder


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["llama-3.1-8b", "bart-base"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
def test_kernels_give_each_request_the_bits_that_it_gets_alone(name, kind):
    network = network_of(shrink(preset(name)), torch.bfloat16 if kind == "bfloat16" else torch.float32)
    accelerate(pack_network(network, kind) if kind.startswith("int") else network)
    engine = toy_engine(network, page_size=16)
    if not engine.deterministic:
        pytest.skip("this processor has no AVX-512")
    check_same_bits(network, None, 16)


def test_one_text_has_the_bits_that_it_has_in_a_batch():
    model = Model(network_of(decoder()))
    options = {"max_new_tokens": 8, "logprobs": 2, "deterministic": True}
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    together = model.generate_many(prompts, **options)
    assert [model.generate(prompt, **options) for prompt in prompts] == together
    assert model.generate_many(prompts, max_new_tokens=8)[0].tokens == together[0].tokens


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", ["float32", "int4"])
def test_a_text_of_the_decode_loop_has_the_bits_of_the_engine(kind):
    """One text uses a contiguous cache, several use pages; the kernels add both in the same order."""
    network = network_of(shrink(preset("llama-3.1-8b")))
    accelerate(pack_network(network, kind) if kind == "int4" else network)
    model = Model(network)
    if not model.engine().deterministic:
        pytest.skip("this processor has no AVX-512")
    prompts = [request.prompt for request in asked_for(network.config)]
    together = model.generate_many(prompts, max_new_tokens=40, logprobs=2)
    alone = [model.generate(prompt, max_new_tokens=40, logprobs=2) for prompt in prompts]
    assert alone == together


def test_deterministic_excludes_beams_and_speculation():
    model = Model(network_of(decoder()))
    with pytest.raises(ClearheadError, match="deterministic excludes beams and speculate"):
        model.generate([1, 2], beams=2, deterministic=True)
    with pytest.raises(ClearheadError, match="deterministic excludes beams and speculate"):
        model.generate([1, 2], speculate="lookup", deterministic=True)
