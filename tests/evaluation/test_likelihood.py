"""Log-likelihoods in batches and with shared contexts, against one plain forward pass for each request."""

from itertools import groupby

import pytest
import torch

from clearhead.api import Model
from clearhead.errors import ClearheadError
from clearhead.evaluation import likelihood
from clearhead.evaluation.likelihood import Request, batches, encode_pair, log_likelihoods
from clearhead.families import preset
from clearhead.tokenization.characters import byte_tokenizer
from clearhead.tokenization.fast import SpecialTokens
from tests.book.shrink import shrink
from tests.checkpoint.tiny import tiny_network
from tests.model.toys import decoder, encoder, toy, translator

DECODERS = ("gpt2", "llama-3.1-8b", "mistral-7b", "gemma-3-1b", "deepseek-v3", "llama-4-scout", "bloom-560m")
SHARED = [
    Request((1, 2, 3, 4, 5), (6, 7)),
    Request((8, 9), (3,)),
    Request((1, 2, 3, 4, 5), (9, 9, 9, 2)),
    Request((8, 9), (1, 4, 1, 5, 9)),
    Request((1, 2, 3, 4, 5), (6,)),
]
ALONE = [Request((7,), (1, 2, 3)), Request((7,), (4,)), Request((1, 2, 3, 4), (5, 6))]


def plainly(network, request):
    """log p of each token and whether all are the likeliest, from one row without padding, batch or cache."""
    whole = torch.tensor([[*request.context, *request.continuation]])
    with torch.no_grad():
        foretold = network(whole)[0, len(request.context) - 1 : -1].float().log_softmax(-1)
    chosen = torch.tensor(request.continuation)
    return foretold[range(len(chosen)), chosen].tolist(), torch.equal(foretold.argmax(-1), chosen)


@pytest.fixture(scope="module", params=DECODERS)
def network(request):
    return toy(shrink(preset(request.param)))


@pytest.mark.parametrize("requests", [SHARED, ALONE, SHARED + ALONE], ids=["shared", "alone", "both"])
@pytest.mark.parametrize("batch_tokens", [1, 30, 8192])
def test_equal_to_a_plain_forward(network, requests, batch_tokens):
    found = log_likelihoods(network, requests, batch_tokens)
    for request, one in zip(requests, found, strict=True):
        logprobs, is_greedy = plainly(network, request)
        assert one.logprobs == pytest.approx(logprobs, abs=1e-5)
        assert one.logprob == pytest.approx(sum(logprobs), abs=1e-5)
        assert one.is_greedy == is_greedy


def test_greedy_is_what_the_model_writes():
    network = toy(decoder())
    written = Model(network).generate([1, 2, 3], max_new_tokens=5).tokens
    other = [*written[:-1], (written[-1] + 1) % 29]
    found = log_likelihoods(network, [Request((1, 2, 3), tuple(written)), Request((1, 2, 3), tuple(other))])
    assert [one.is_greedy for one in found] == [True, False]


def test_a_shared_context_is_read_once():
    network, read = toy(decoder()), []
    network.decoder.register_forward_hook(lambda module, inputs, output: read.append(tuple(inputs[0].shape)))
    context = tuple(range(20))
    log_likelihoods(network, [Request(context, (token, 1, 2)) for token in range(4)])
    assert read == [(1, 19), (4, 3)]
    read.clear()
    log_likelihoods(network, [Request((token, *context), (1, 2, 3)) for token in range(4)])
    assert read == [(4, 23)]  # none is shared: one pass


def test_logits_exist_only_for_what_is_scored(monkeypatch):
    monkeypatch.setattr(likelihood, "LOGIT_ROWS", 2)
    network, rows = toy(decoder()), []
    network.head.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    requests = [Request(tuple(range(20)), (1, 2, 3)), Request((5, 6), (7, 8))]
    found = log_likelihoods(network, requests)
    assert rows == [2, 2, 1]
    assert found[1].logprobs == pytest.approx(plainly(network, requests[1])[0], abs=1e-5)


def test_batches_hold_their_size_and_keep_contexts_together():
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 12, (40, 2), generator=random).tolist()
    requests = [Request((context,) * context, (1,) * length) for context, length in lengths]
    made = list(batches(requests, 60))
    assert sorted(number for batch in made for number in batch) == list(range(40))
    for batch in made:
        assert len(batch) == 1 or len(batch) * max(len(requests[number]) for number in batch) <= 60
    whole = [number for batch in batches(requests, 10**6) for number in batch]
    contexts = [requests[number].context for number in whole]
    assert len([context for context, _ in groupby(contexts)]) == len(set(contexts))


def test_a_context_is_cut_from_its_beginning():
    request = Request((1, 2, 3, 4, 5), (6, 7, 8))
    assert request.within(5) == Request((3, 4, 5), (6, 7, 8))
    assert request.within(7) == request
    assert request.within(3) == Request((5,), (6, 7, 8))
    with pytest.raises(ClearheadError, match="has 3 tokens; this model reads 2"):
        request.within(2)


def test_learned_positions_are_used_to_the_last():
    network = toy(shrink(preset("gpt2")))  # 32 positions
    request = Request(tuple(range(1, 21)), tuple(range(1, 14)))  # 33 tokens, of which the last is not read
    with torch.no_grad():
        foretold = network(torch.tensor([[*request.context, *request.continuation[:-1]]]))[0, 19:].log_softmax(-1)
    expected = [foretold[place, token].item() for place, token in enumerate(request.continuation)]
    assert log_likelihoods(network, [request])[0].logprobs == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ClearheadError, match="reads 32 at most"):
        log_likelihoods(network, [Request(request.context, (*request.continuation, 1))])


# --- text


def test_spaces_at_the_border_belong_to_the_continuation():
    tokenizer = byte_tokenizer()
    assert encode_pair("ab ", "c", tokenizer) == Request((97, 98), (32, 99))
    assert encode_pair("ab", " c", tokenizer) == Request((97, 98), (32, 99))


def test_an_empty_context_is_the_beginning_of_a_text():
    assert encode_pair("", "c", byte_tokenizer()) == Request((256,), (99,))  # the end of another, where none begins
    begins = byte_tokenizer(SpecialTokens(bos="<s>", eos="</s>"))
    assert encode_pair("", "c", begins) == Request((begins.bos_id,), (99,))
    with pytest.raises(ClearheadError, match="this vocabulary has none"):
        encode_pair("", "c", byte_tokenizer(SpecialTokens(unknown="?!")))
    with pytest.raises(ClearheadError, match="no tokens of its own"):
        encode_pair("ab", "", byte_tokenizer())


@pytest.mark.parametrize("config", [encoder(), translator()], ids=["encoder", "encoder-decoder"])
def test_only_a_decoder_alone(config):
    with pytest.raises(ClearheadError, match="only a decoder alone"):
        log_likelihoods(toy(config), SHARED)


def test_token_ids_are_checked():
    with pytest.raises(ClearheadError, match="token id 99 is out of range"):
        log_likelihoods(tiny_network(), [Request((1, 2), (99,))])


def test_progress_is_told_to_the_end():
    told = []
    log_likelihoods(tiny_network(), SHARED, batch_tokens=12, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (5, 5)
    assert len(told) > 1
