"""The engine in CUDA graphs: each request gets the tokens of the loop without a cache, whatever runs beside it."""

import random
from dataclasses import replace

import pytest
import torch

from clearhead.engine import Engine, Request
from clearhead.engine.graph_executor import GraphExecutor
from clearhead.engine.memory import bytes_per_token
from clearhead.families import preset
from clearhead.model import Attention, Transformer
from clearhead.options import SamplingOptions
from clearhead.sampling import Draft
from tests.engine.toys import check_no_page_is_lost, finished_tokens, plain_tokens
from tests.model.toys import redraw

pytestmark = pytest.mark.gpu


def small_network(name, layers=3):
    """Return a network of few layers and of a small vocabulary, with all choices of a preset, in float32 on the GPU."""
    config = preset(name)
    encoder, decoder = (
        stack and replace(stack, embedding=replace(stack.embedding, vocab_size=500), layers=stack.layers[:layers])
        for stack in (config.encoder, config.decoder)
    )
    network = Transformer(replace(config, encoder=encoder, decoder=decoder, context=1024)).cuda().eval()
    redraw(network)
    for module in network.modules():
        if isinstance(module, Attention) and module.config.scale == 1.0:  # T5: its scores would amplify rounding errors
            module.query.weight.data *= module.config.head_width**-0.5
    return network


def random_requests(rng, count, has_encoder=False):
    shared = [rng.randrange(500) for _ in range(70)]
    requests = []
    for number in range(count):
        prompt = [rng.randrange(500) for _ in range(rng.randint(1, 90))]
        if number % 3 == 0:
            prompt = shared[: rng.randint(40, 70)] + prompt[:10]
        options = SamplingOptions(
            max_new_tokens=rng.randint(1, 40),
            temperature=rng.choice([0.0, 0.0, 0.9]),
            seed=number,
            top_p=rng.choice([None, 0.8]),
            top_k=rng.choice([None, 20]),
            min_p=rng.choice([None, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            stop_ids=[rng.randrange(500)],
            logprobs=rng.choice([None, None, 2]),
        )
        source = [rng.randrange(500) for _ in range(rng.randint(1, 200))] if has_encoder else ()
        requests.append(Request(prompt=prompt, options=options, source=source))
    return requests


@pytest.mark.parametrize(
    "name",
    [
        *("llama-3.2-1b", "qwen3-0.6b", "mistral-7b", "gemma-3-1b", "gpt2"),
        *("t5-v1.1-base", "umt5-small", "bart-base", "transformer-base"),
    ],
)
@pytest.mark.parametrize("num_pages", [400, 14])
def test_every_request_gets_the_tokens_of_the_loop_without_a_cache(name, num_pages):
    network = small_network(name)
    engine = Engine(network, memory=_memory(network, num_pages), max_tokens=128, max_sequences=12)
    assert isinstance(engine.executor, GraphExecutor)
    rng = random.Random(0)
    asked = random_requests(rng, 24, network.config.is_encoder_decoder)
    ids, events = [], []
    waiting = list(asked)
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), rng.randint(0, 3))):
            ids.append(engine.add(waiting.pop(0)))
        if ids and rng.random() < 0.05:
            engine.abort(rng.choice(ids))
        events += engine.step()
    tokens, reasons = finished_tokens(events)
    for request, request_id in zip(asked, ids, strict=True):
        expected = plain_tokens(network, request)
        found = tokens[request_id]
        assert found == expected[: len(found)], request_id
        assert reasons[request_id] in ("aborted", "stop", "length")
        if reasons[request_id] != "aborted":
            assert len(found) == len(expected)
    check_no_page_is_lost(engine)


def _memory(network, num_pages):
    return bytes_per_token(network.config.output_stack, torch.float32) * 32 * num_pages


def test_log_probabilities_are_those_of_the_network():
    network = small_network("llama-3.2-1b")
    engine = Engine(network, memory=_memory(network, 100), max_sequences=4)
    request = Request(prompt=[1, 2, 3], options=SamplingOptions(max_new_tokens=5, logprobs=3))
    events = list(engine.run([request]))
    ids = torch.tensor([[1, 2, 3, *(event.token for event in events)]], device="cuda")
    with torch.no_grad():
        expected = network(ids)[0, 2:-1].float().log_softmax(-1)
    for row, event in zip(expected, events, strict=True):
        assert abs(float(event.logprobs.chosen) - float(row[event.token])) < 1e-4
        assert event.logprobs.top_ids.tolist() == row.topk(3).indices.tolist()


def test_prompts_are_scored_and_filters_obeyed_beside_captured_steps():
    network = small_network("llama-3.2-1b")
    engine = Engine(network, memory=_memory(network, 100), max_tokens=48, max_sequences=8)
    rng = random.Random(1)
    plain = random_requests(rng, 4)
    prompt = [rng.randrange(500) for _ in range(90)]
    options = SamplingOptions(max_new_tokens=9)
    asked = [
        *plain,
        Request(prompt=prompt, options=options, prompt_logprobs=2),
        Request(prompt=prompt[:70], options=SamplingOptions(max_new_tokens=0), prompt_logprobs=2),
        Request(prompt=prompt[:20], options=options, token_filter=_OnlyEven()),
    ]
    events = list(engine.run(asked))
    tokens, _ = finished_tokens(events)
    assert [tokens[number] for number in range(4)] == [plain_tokens(network, request) for request in plain]
    reports = {event.request_id: event.prompt for event in events if event.prompt is not None}
    for number in (4, 5):
        ids = torch.tensor([asked[number].prompt], device="cuda")
        with torch.no_grad():
            expected = network(ids)[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu()
        torch.testing.assert_close(reports[number].logprobs.chosen, expected, atol=1e-3, rtol=1e-3)
    text = list(prompt[:20])
    for token in tokens[6]:
        with torch.no_grad():
            logits = network(torch.tensor([text], device="cuda"))[0, -1, ::2]
        assert token == 2 * int(logits.argmax())
        text.append(token)
    assert len(tokens[6]) == 9
    check_no_page_is_lost(engine)


class _OnlyEven:
    def allowed_tokens(self):
        return torch.arange(500) % 2 == 0

    def accept(self, token):
        assert token % 2 == 0

    def fork(self):
        return self


def test_deterministic_mode_gives_the_same_bits_alone_and_together():
    network = small_network("llama-3.2-1b")
    asked = random_requests(random.Random(2), 5)

    def logprobs(requests, **settings):
        engine = Engine(network, memory=_memory(network, 60), deterministic=True, **settings)
        found = {}
        for event in engine.run(requests):
            if event.logprobs is not None:
                found.setdefault(event.request_id, []).append((event.token, float(event.logprobs.chosen)))
        return found

    asked = [Request(prompt=each.prompt, options=replace(each.options, logprobs=1)) for each in asked]
    together = logprobs(asked, max_tokens=40, max_sequences=8)
    assert [together[number] for number in range(5)] == [logprobs([request])[0] for request in asked]


def test_texts_with_drafts_share_steps_with_captured_ones():
    network = small_network("llama-3.2-1b")
    engine = Engine(network, memory=_memory(network, 100), max_tokens=128, max_sequences=8)
    asked = random_requests(random.Random(3), 6)
    asked = [Request(prompt=each.prompt, options=replace(each.options, temperature=0.0)) for each in asked]
    expected = [plain_tokens(network, request) for request in asked]
    drafted = [
        replace(request, drafter=_Guesses(text)) if number % 2 else request
        for number, (request, text) in enumerate(zip(asked, expected, strict=True))
    ]
    tokens, _ = finished_tokens(engine.run(drafted))
    assert [tokens[number] for number in range(6)] == expected
    assert engine.statistics.num_accepted_tokens > 0
    check_no_page_is_lost(engine)


class _Guesses:
    """Draft the right tokens, but a wrong one at every fifth place."""

    num_tokens = 4

    def __init__(self, text):
        self.text = text

    def draft(self, output, count):
        tokens = self.text[len(output) : len(output) + count]
        return Draft([(token + ((len(output) + n) % 5 == 4)) % 500 for n, token in enumerate(tokens)])
