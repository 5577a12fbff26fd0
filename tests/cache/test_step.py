"""forward_step and forward_hidden: the numbers of the network with a cache, which they advance."""

import pytest
import torch

from clearhead.architecture import Head, ModelConfig
from clearhead.cache.key_value_cache import KeyValueCache
from clearhead.cache.step import forward_hidden, forward_step
from tests.model.toys import CONTEXT, WIDTH, decoder, latent, stack, toy, translator

TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
LATENT = ModelConfig(width=WIDTH, context=CONTEXT, decoder=stack(latent()), head=Head())


@pytest.mark.parametrize("config", [decoder(), LATENT], ids=["grouped", "latent"])
@torch.no_grad()
def test_steps_equal_one_forward_pass(config):
    network, cache = toy(config), KeyValueCache(config)
    expected = network(TOKENS)
    first = forward_step(network, TOKENS[:, :2], cache, last_only=False)
    second = forward_step(network, TOKENS[:, 2:3], cache)
    third = forward_hidden(network, TOKENS[:, 3:], cache)
    assert cache.length == 4
    torch.testing.assert_close(first, expected[:, :2])
    torch.testing.assert_close(second, expected[:, 2])
    torch.testing.assert_close(network.compute_logits(third), expected[:, 3:])


@torch.no_grad()
def test_padding_is_masked():
    network, cache = toy(decoder()), KeyValueCache(decoder())
    mask = torch.tensor([[True] * 4, [False, True, True, True]])
    logits = forward_step(network, TOKENS, cache, mask)
    torch.testing.assert_close(logits[1:], network(TOKENS[1:, 1:])[:, -1])


@torch.no_grad()
def test_an_encoder_output_is_passed_to_cross_attention():
    network = toy(translator())
    encoder_output = network.encode(TOKENS)
    logits = forward_step(network, TOKENS[:, :2], KeyValueCache(network.config), encoder_output=encoder_output)
    torch.testing.assert_close(logits, network.decode(TOKENS[:, :2], encoder_output)[:, -1])


@pytest.mark.parametrize(("absorb", "expected"), [(None, [False, True]), (True, [True, True]), (False, [False, False])])
def test_a_single_token_is_absorbed_by_default(absorb, expected, monkeypatch):
    network, cache, seen = toy(LATENT), KeyValueCache(LATENT), []
    hidden_states = network.hidden_states

    def record(*inputs, **options):
        seen.append(options["absorb"])
        return hidden_states(*inputs, **options)

    monkeypatch.setattr(network, "hidden_states", record)
    with torch.no_grad():
        for tokens in (TOKENS[:, :2], TOKENS[:, 2:3]):
            forward_step(network, tokens, cache, absorb=absorb)
    assert seen == expected
