"""Test logit attribution: the contributions of all parts add up to the logit."""

from dataclasses import replace

import pytest
import torch

from clearhead.api import Model
from clearhead.architecture import DeviationNorm, LayerNorm, Rope
from clearhead.errors import ClearheadError
from clearhead.inspection import attribute_logit
from tests.inspection.toy_traces import TOKENS, trace_toy
from tests.model.toys import decoder, stack, toy

FAMILIES = ("gpt2", "llama-3.1-8b", "gemma-3-1b", "palm-540b", "deepseek-v3", "bloom-560m", "t5-small", "grok-1")
FAMILIES += ("pythia-160m", "olmo-2-1b", "granite-3.1-2b", "minitron-4b", "olmo-1b")


@pytest.mark.parametrize("name", FAMILIES)
def test_contributions_add_up_to_the_logit(name):
    traced = trace_toy(name)
    for position in (-1, 2):
        logits = traced.logits[position]
        cap = traced.config.head.softcap
        logits = logits if cap is None else cap * torch.atanh(logits / cap)
        attribution = attribute_logit(traced, token=11, position=position)
        assert attribution.logit == pytest.approx(logits[11].item(), abs=1e-9)
        assert attribute_logit(traced, 11, position, against=4).logit == pytest.approx(
            (logits[11] - logits[4]).item(), abs=1e-9
        )
    by_head = attribute_logit(traced, 11, by_head=True)
    assert by_head.logit == pytest.approx(uncapped_logit(traced, 11), abs=1e-9)
    assert sum(one.head is not None for one in by_head.contributions) == 4 * traced.num_layers
    by_layer = {one.layer: one.logit for one in attribute_logit(traced, 11).contributions if one.part == "attention"}
    for layer, logit in by_layer.items():
        heads = [one.logit for one in by_head.contributions if (one.part, one.layer) == ("attention", layer)]
        assert sum(heads) == pytest.approx(logit, abs=1e-9)


def uncapped_logit(traced, token):
    logit, cap = traced.logits[-1, token], traced.config.head.softcap
    return (logit if cap is None else cap * torch.atanh(logit / cap)).item()


@pytest.mark.parametrize("norm", [LayerNorm(epsilon=0.1), LayerNorm(epsilon=0.1, bias=False), None], ids=str)
def test_contributions_add_up_under_other_final_norms(norm):
    config = decoder(position=Rope())
    traced = Model(toy(replace(config, decoder=replace(config.decoder, final_norm=norm)))).trace(TOKENS)
    assert attribute_logit(traced, 5).logit == pytest.approx(traced.logits[-1, 5].item(), abs=1e-9)


def test_without_a_final_norm_a_contribution_is_the_logit_change_of_removing_the_part():
    """Without a final norm there is no divisor, so this is exact for the last feed-forward layer."""
    config = decoder(position=Rope())
    traced = Model(toy(replace(config, decoder=replace(config.decoder, final_norm=None)))).trace(TOKENS)
    contributions = attribute_logit(traced, 5).contributions
    last = next(one for one in contributions if (one.part, one.layer) == ("feed_forward", 1))
    without = traced.compute_logits(traced.residual_middle(1))[-1, 5].item()
    assert last.logit == pytest.approx(traced.logits[-1, 5].item() - without, abs=1e-9)
    largest = attribute_logit(traced, 5).largest(3)
    assert abs(largest[0].logit) >= abs(largest[1].logit) >= abs(largest[2].logit)


def test_contributions_of_a_stream_whose_squares_overflow_float16():
    network = toy(decoder(position=Rope())).float()
    with torch.no_grad():
        network.decoder.layers[1].feed_forward.down.weight.mul_(2000.0)
    traced = Model(network.half()).trace(TOKENS)
    assert traced.residual(2).square().mean().isinf()
    assert attribute_logit(traced, 5, by_head=True).logit == pytest.approx(traced.logits[-1, 5].item(), rel=0.01)


@pytest.mark.parametrize("norm", [LayerNorm(epsilon=0.1), DeviationNorm(epsilon=0.1)], ids=str)
def test_contributions_under_a_norm_with_a_bias_in_bfloat16(norm):
    config = decoder(position=Rope())
    network = toy(replace(config, decoder=replace(config.decoder, final_norm=norm)), torch.bfloat16)
    traced = Model(network).trace(TOKENS)
    assert attribute_logit(traced, 5, by_head=True).logit == pytest.approx(traced.logits[-1, 5].item(), rel=0.03)


def test_attribute_logit_raises_if_logits_are_not_a_sum_or_the_token_is_out_of_range():
    post = Model(toy(replace(decoder(), decoder=stack(decoder().decoder.layers[0].attention, placement="post"))))
    with pytest.raises(ClearheadError, match="its residual stream is not a sum"):
        attribute_logit(post.trace(TOKENS), 5)
    with pytest.raises(ClearheadError, match="no vocabulary head"):
        attribute_logit(trace_toy("bert-base"), 5)
    with pytest.raises(ClearheadError, match="token 29 is out of range"):
        attribute_logit(Model(toy(decoder())).trace(TOKENS), 29)
