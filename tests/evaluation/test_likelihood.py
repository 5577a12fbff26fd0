"""Test log-likelihoods in batches and with shared contexts against one plain forward pass per request."""

from itertools import groupby

import pytest
import torch

from clearhead.api import Model
from clearhead.engine import Engine
from clearhead.errors import ClearheadError
from clearhead.evaluation import likelihood as likelihood_module
from clearhead.evaluation.engine_likelihood import log_likelihoods_in_engine
from clearhead.evaluation.likelihood import Request, encode_request, log_likelihoods, make_batches
from clearhead.families import preset
from clearhead.tokenization.characters import byte_tokenizer
from clearhead.tokenization.library_tokenizer import SpecialTokens
from tests.checkpoint.tiny import tiny_network
from tests.model.toys import decoder, encoder, toy, translator
from tests.toy_presets import shrink

DECODERS = ("gpt2", "llama-3.1-8b", "mistral-7b", "gemma-3-1b", "deepseek-v3", "llama-4-scout", "bloom-560m")
SHARED_CONTEXTS = [
    Request((1, 2, 3, 4, 5), (6, 7)),
    Request((8, 9), (3,)),
    Request((1, 2, 3, 4, 5), (9, 9, 9, 2)),
    Request((8, 9), (1, 4, 1, 5, 9)),
    Request((1, 2, 3, 4, 5), (6,)),
]
SEPARATE_CONTEXTS = [Request((7,), (1, 2, 3)), Request((7,), (4,)), Request((1, 2, 3, 4), (5, 6))]


def plain_likelihood(network, request):
    """Return log p of each token, and whether all are the most likely ones, without padding, batch or cache."""
    tokens = torch.tensor([[*request.context, *request.continuation]])
    with torch.no_grad():
        logprobs = network(tokens)[0, len(request.context) - 1 : -1].float().log_softmax(-1)
    chosen = torch.tensor(request.continuation)
    return logprobs[range(len(chosen)), chosen].tolist(), torch.equal(logprobs.argmax(-1), chosen)


@pytest.fixture(scope="module", params=DECODERS)
def network(request):
    return toy(shrink(preset(request.param)))


@pytest.mark.parametrize(
    "requests",
    [SHARED_CONTEXTS, SEPARATE_CONTEXTS, SHARED_CONTEXTS + SEPARATE_CONTEXTS],
    ids=["shared", "separate", "both"],
)
@pytest.mark.parametrize("batch_tokens", [1, 30, 8192])
def test_likelihoods_equal_those_of_a_plain_forward_pass(network, requests, batch_tokens):
    likelihoods = log_likelihoods(network, requests, batch_tokens)
    for request, likelihood in zip(requests, likelihoods, strict=True):
        logprobs, is_greedy = plain_likelihood(network, request)
        assert likelihood.logprobs == pytest.approx(logprobs, abs=1e-5)
        assert likelihood.logprob == pytest.approx(sum(logprobs), abs=1e-5)
        assert likelihood.is_greedy == is_greedy


def test_likelihoods_of_the_engine_equal_those_of_a_plain_forward_pass(network):
    requests = SHARED_CONTEXTS + SEPARATE_CONTEXTS
    engine = Engine(network, deterministic=True)
    for request, likelihood in zip(requests, log_likelihoods_in_engine(engine, requests), strict=True):
        logprobs, is_greedy = plain_likelihood(network, request)
        assert likelihood.logprobs == pytest.approx(logprobs, abs=1e-5)
        assert likelihood.is_greedy == is_greedy
        (alone,) = log_likelihoods_in_engine(engine, [request])
        assert alone == likelihood  # to the last bit


def test_a_request_that_the_engine_cannot_read_raises():
    network = toy(decoder())
    with pytest.raises(ClearheadError, match="token"):
        log_likelihoods_in_engine(Engine(network), [Request((1,), (10**6,))])


def test_is_greedy_means_that_greedy_decoding_generates_it():
    network = toy(decoder())
    generated = Model(network).generate([1, 2, 3], max_new_tokens=5).tokens
    other = [*generated[:-1], (generated[-1] + 1) % 29]
    likelihoods = log_likelihoods(network, [Request((1, 2, 3), tuple(generated)), Request((1, 2, 3), tuple(other))])
    assert [one.is_greedy for one in likelihoods] == [True, False]


def test_a_shared_context_is_read_once():
    network, shapes = toy(decoder()), []
    network.decoder.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(inputs[0].shape)))
    context = tuple(range(20))
    log_likelihoods(network, [Request(context, (token, 1, 2)) for token in range(4)])
    assert shapes == [(1, 19), (4, 3)]
    shapes.clear()
    log_likelihoods(network, [Request((token, *context), (1, 2, 3)) for token in range(4)])
    assert shapes == [(4, 23)]  # nothing is shared: one pass


def test_logits_are_computed_only_for_scored_tokens(monkeypatch):
    monkeypatch.setattr(likelihood_module, "LOGITS_CHUNK", 2)
    network, sizes = toy(decoder()), []
    network.head.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    requests = [Request(tuple(range(20)), (1, 2, 3)), Request((5, 6), (7, 8))]
    likelihoods = log_likelihoods(network, requests)
    assert sizes == [2, 2, 1]
    assert likelihoods[1].logprobs == pytest.approx(plain_likelihood(network, requests[1])[0], abs=1e-5)


def test_batches_respect_the_limit_and_keep_equal_contexts_together():
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 12, (40, 2), generator=random).tolist()
    requests = [Request((context,) * context, (1,) * length) for context, length in lengths]
    batches = list(make_batches(requests, 60))
    assert sorted(number for batch in batches for number in batch) == list(range(40))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(len(requests[number]) for number in batch) <= 60
    ordered = [number for batch in make_batches(requests, 10**6) for number in batch]
    contexts = [requests[number].context for number in ordered]
    assert len([context for context, _ in groupby(contexts)]) == len(set(contexts))


def test_truncate_drops_the_beginning_of_the_context():
    request = Request((1, 2, 3, 4, 5), (6, 7, 8))
    assert request.truncate(5) == Request((3, 4, 5), (6, 7, 8))
    assert request.truncate(7) == request
    assert request.truncate(3) == Request((5,), (6, 7, 8))
    with pytest.raises(ClearheadError, match="has 3 tokens, but this model reads at most 2"):
        request.truncate(2)


def test_all_learned_positions_can_be_used():
    network = toy(shrink(preset("gpt2")))  # 32 positions
    request = Request(tuple(range(1, 21)), tuple(range(1, 14)))  # 33 tokens, of which the last is not read
    with torch.no_grad():
        logprobs = network(torch.tensor([[*request.context, *request.continuation[:-1]]]))[0, 19:].log_softmax(-1)
    expected = [logprobs[position, token].item() for position, token in enumerate(request.continuation)]
    assert log_likelihoods(network, [request])[0].logprobs == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ClearheadError, match="reads at most 32"):
        log_likelihoods(network, [Request(request.context, (*request.continuation, 1))])


# --- text


def test_spaces_at_the_end_of_the_context_belong_to_the_continuation():
    tokenizer = byte_tokenizer()
    assert encode_request("ab ", "c", tokenizer) == Request((97, 98), (32, 99))
    assert encode_request("ab", " c", tokenizer) == Request((97, 98), (32, 99))


def test_an_empty_context_is_replaced_by_a_start_token():
    assert encode_request("", "c", byte_tokenizer()) == Request(
        (256,), (99,)
    )  # the end-of-text token, since there is no beginning-of-text token
    with_bos = byte_tokenizer(SpecialTokens(bos="<s>", eos="</s>"))
    assert encode_request("", "c", with_bos) == Request((with_bos.bos_id,), (99,))
    with pytest.raises(ClearheadError, match="this tokenizer has neither"):
        encode_request("", "c", byte_tokenizer(SpecialTokens(unknown="?!")))
    with pytest.raises(ClearheadError, match="adds no tokens to its context"):
        encode_request("ab", "", byte_tokenizer())


@pytest.mark.parametrize("config", [encoder(), translator()], ids=["encoder", "encoder-decoder"])
def test_models_with_an_encoder_raise(config):
    with pytest.raises(ClearheadError, match="needs a decoder-only model"):
        log_likelihoods(toy(config), SHARED_CONTEXTS)


def test_token_ids_out_of_range_raise():
    with pytest.raises(ClearheadError, match="token id 99 is out of range"):
        log_likelihoods(tiny_network(), [Request((1, 2), (99,))])


def test_progress_is_reported_up_to_the_total():
    calls = []
    log_likelihoods(
        tiny_network(), SHARED_CONTEXTS, batch_tokens=12, progress=lambda done, total: calls.append((done, total))
    )
    assert calls[-1] == (5, 5)
    assert len(calls) > 1
