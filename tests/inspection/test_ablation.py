"""Test ablation against networks in which the part is really removed."""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import kl_div, log_softmax

from clearhead.api import Model
from clearhead.architecture import Dropout, Rope
from clearhead.backends import pack_network
from clearhead.backends.cpu.stack import accelerate
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.inspection import Effect, ablate, ablate_parts, attribute_logit
from clearhead.model import Transformer
from clearhead.training.objective import recompute_blocks
from tests.inspection.toy_traces import SOURCE, TOKENS, trace_toy
from tests.model.toys import assert_close, decoder, toy, translator
from tests.toy_presets import shrink


def last_logits(network, tokens=TOKENS):
    with torch.no_grad():
        return network(torch.tensor([tokens]))[0, -1]


def assert_effect(effect, before, after):
    assert_close(effect.before, log_softmax(before.float(), dim=-1), 1e-5)
    assert_close(effect.after, log_softmax(after.float(), dim=-1), 1e-5)
    expected = kl_div(effect.after, effect.before, reduction="sum", log_target=True).item()
    assert effect.divergence == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "gemma-3-1b", "palm-540b"])
def test_ablating_a_head_equals_zeros_in_the_output_projection(name):
    traced = trace_toy(name)
    without = deepcopy(traced.network)
    output = without.decoder.layers[1].attention.output
    width = output.in_features // 4
    with torch.no_grad():
        output.weight[:, 2 * width : 3 * width] = 0
    effect = ablate(traced, layer=1, head=2)
    assert_effect(effect, last_logits(traced.network), last_logits(without))
    assert effect.divergence > 1e-6


def test_without_parts_nothing_changes_and_the_network_is_not_run(monkeypatch):
    traced = trace_toy("llama-3.1-8b")
    expected = ablate_parts(traced, [(0, "attention", 1)]).before
    monkeypatch.setattr(type(traced), "rerun", None)
    effect = ablate_parts(traced, [])
    assert torch.equal(effect.before, expected)
    assert torch.equal(effect.after, expected)


def test_packed_networks_can_be_ablated_but_not_attributed():
    network = toy(shrink(preset("llama-3.1-8b")), torch.bfloat16)
    pack_network(network, "int8")
    traced = Model(network).trace(TOKENS)
    assert ablate(traced, layer=1, head=2).divergence > 0
    with pytest.raises(ClearheadError, match="the weights of this model are packed"):
        attribute_logit(traced, 5)


@pytest.mark.parametrize("part", ["attention", "feed_forward"])
def test_ablating_a_branch_equals_zeros_in_its_last_matrix(part):
    traced = trace_toy("llama-3.1-8b")
    without = deepcopy(traced.network)
    last = getattr(without.decoder.layers[0], part)
    torch.nn.init.zeros_(last.output.weight if part == "attention" else last.down.weight)
    assert_effect(ablate(traced, 0, part=part), last_logits(traced.network), last_logits(without))


def test_ablating_a_layer_equals_the_network_without_it():
    traced = trace_toy("gpt2")
    config = traced.config
    layers = config.decoder.layers
    shorter = Transformer(replace(config, decoder=replace(config.decoder, layers=layers[:2] + layers[3:]))).double()
    tensors = traced.network.state_dict()
    remaining = [number for number in range(len(layers)) if number != 2]
    for name in shorter.state_dict():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(remaining[int(parts[2])])
        shorter.state_dict()[name].copy_(tensors[".".join(parts)])
    assert_effect(ablate(traced, 2), last_logits(traced.network), last_logits(shorter.eval()))


def test_mean_ablation_keeps_what_all_tokens_have_in_common():
    traced = Model(toy(decoder(position=Rope()))).trace([7] * 6)
    assert ablate(traced, 0, head=1, by="mean").divergence == pytest.approx(0.0, abs=1e-6)  # all tokens are equal
    assert ablate(traced, 0, head=1).divergence > 1e-4
    varied = trace_toy("llama-3.1-8b")
    assert ablate(varied, 1, by="mean").divergence > 1e-6
    assert ablate(varied, 1, part="feed_forward", by="mean").divergence > 1e-6


@pytest.mark.parametrize("fast", [False, True])
def test_ablation_of_a_compiled_network(fast):
    network = toy(decoder(position=Rope()), torch.float32)
    assert not fast or accelerate(network, build=True)
    traced = Model(network).trace(TOKENS)
    expected = ablate(traced, 0, head=1)
    assert expected.divergence > 1e-4
    traced.network.decoder.compile(backend="eager")
    traced.rerun(-1)
    assert_close(ablate(traced, 0, head=1).after, expected.after, 1e-6)


@pytest.mark.parametrize("part", ["residual", "attention", "feed_forward"])
def test_ablation_during_training(part):
    traced = Model(toy(replace(decoder(), dropout=Dropout(attention=0.5)))).trace(TOKENS)
    expected = ablate(traced, 0, part=part)
    recompute_blocks(traced.network.train())
    assert_close(ablate(traced, 0, part=part).after, expected.after, 1e-6)


def test_ablation_in_the_encoder_of_an_encoder_decoder():
    traced = Model(toy(translator())).trace(TOKENS, SOURCE)
    assert ablate(traced, 1, head=0, stack="encoder").divergence > 1e-6


def test_effect_lists_the_most_likely_tokens_and_the_divergence():
    effect = Effect.from_logits(torch.tensor([2.0, 1.0, 0.0]).log1p(), torch.tensor([0.0, 1.0, 5.0]).log1p())
    assert effect.top_before(2) == [(0, pytest.approx(3 / 6)), (1, pytest.approx(2 / 6))]
    assert effect.top_after()[0] == (2, pytest.approx(6 / 9))
    assert effect.gain(2) == pytest.approx(math.log(6 / 9) - math.log(1 / 6))
    expected = sum(p * math.log(p / q) for p, q in zip((3 / 6, 2 / 6, 1 / 6), (1 / 9, 2 / 9, 6 / 9), strict=True))
    assert effect.divergence == pytest.approx(expected)
    with pytest.raises(ClearheadError, match="token 3 is out of range"):
        effect.gain(3)


WRONG = {
    "layer 9 is out of range": {"layer": 9},
    "head 4 is out of range": {"layer": 0, "head": 4},
    "heads are parts of attention": {"layer": 0, "head": 1, "part": "feed_forward"},
    "unknown part 'attentoin'; did you mean 'attention'": {"layer": 0, "part": "attentoin"},
    "unknown ablation": {"layer": 0, "by": "noise"},
    "position 8 is out of range": {"layer": 0, "position": 8},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_of_ablate_raise(message):
    with pytest.raises(ClearheadError, match=message):
        ablate(Model(toy(decoder())).trace(TOKENS), **WRONG[message])
