"""Test which optimizer updates which weights."""

import pytest
import torch

from clearhead.architecture import Experts, FeedForward, Head, ModelConfig, Router
from clearhead.errors import ClearheadError
from clearhead.training.optimizer import AdamW, Muon, build_optimizers, set_learning_rates
from tests.model.toys import CONTEXT, WIDTH, decoder, grouped, stack, toy, translator


def groups_of(network, config):
    """Return the optimizer and the weight decay of each weight."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    return {
        names[id(parameter)]: (type(optimizer).__name__, group["weight_decay"])
        for optimizer in build_optimizers(network, config)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@pytest.mark.parametrize("config", [AdamW(weight_decay=0.3), Muon(weight_decay=0.2, rest=AdamW(weight_decay=0.3))])
def test_every_weight_has_an_optimizer_and_only_matrices_decay(config):
    network = toy(translator())
    groups = groups_of(network, config)
    assert set(groups) == {name for name, _ in network.named_parameters()}
    for name, parameter in network.named_parameters():
        decays = parameter.ndim == 2 and "embedding" not in name
        rule = "Muon" if decays and isinstance(config, Muon) else "AdamW"
        decay = (0.2 if isinstance(config, Muon) else 0.3) if decays else 0.0
        assert groups[name] == (rule, decay), name


def test_adamw_updates_stacked_experts_and_the_head():
    experts = Experts(
        num_experts=4, num_chosen=2, expert=FeedForward(width=8, activation="silu"), router=Router(score="softmax")
    )
    config = ModelConfig(
        width=WIDTH, context=CONTEXT, decoder=stack(grouped(), feed_forward=experts), head=Head(tied=False)
    )
    groups = groups_of(toy(config), Muon())
    assert groups["decoder.layers.0.feed_forward.up"][0] == "AdamW"
    assert groups["head.weight"][0] == "AdamW"
    assert groups["decoder.layers.0.attention.query.weight"][0] == "Muon"


def test_one_step_of_adamw_equals_the_formula():
    network = torch.nn.Linear(3, 2, bias=False)
    weight = network.weight.detach().clone()
    (optimizer,) = build_optimizers(network, AdamW(learning_rate=0.1, weight_decay=0.5, epsilon=1e-8))
    network(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(network.weight.detach(), weight * (1 - 0.1 * 0.5) - 0.1)  # every gradient is 1


def test_set_learning_rates_scales_the_configured_rates():
    optimizers = build_optimizers(toy(decoder()), Muon(learning_rate=0.02, rest=AdamW(learning_rate=0.001)))
    set_learning_rates(optimizers, 0.5)
    set_learning_rates(optimizers, 0.25)  # relative to the configured rate, not to the last one
    assert {group["lr"] for optimizer in optimizers for group in optimizer.param_groups} == {0.005, 0.00025}


def test_frozen_weights_have_no_optimizer():
    network = toy(decoder())
    network.requires_grad_(False)
    network.decoder.layers[0].attention.query.weight.requires_grad_(True)
    assert list(groups_of(network, AdamW())) == ["decoder.layers.0.attention.query.weight"]


def test_a_momentum_of_one_is_rejected():
    with pytest.raises(ClearheadError, match=r"momentum is 1\.0; it must be below 1"):
        Muon(momentum=1.0)
