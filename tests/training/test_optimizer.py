"""Which weights are moved by which rule."""

import pytest
import torch

from clearhead.architecture.branches import Experts, FeedForward, Router
from clearhead.architecture.config import Head, ModelConfig
from clearhead.errors import ClearheadError
from clearhead.training.optimizer import AdamW, Muon, build_optimizers, set_rates
from tests.model.toys import CONTEXT, WIDTH, decoder, grouped, stack, toy, translator


def groups_of(network, config):
    """Name of a weight -> (rule, decay)."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    return {
        names[id(parameter)]: (type(optimizer).__name__, group["weight_decay"])
        for optimizer in build_optimizers(network, config)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@pytest.mark.parametrize("config", [AdamW(weight_decay=0.3), Muon(weight_decay=0.2, rest=AdamW(weight_decay=0.3))])
def test_every_weight_is_in_one_group_and_only_matrices_decay(config):
    network = toy(translator())
    found = groups_of(network, config)
    assert set(found) == {name for name, _ in network.named_parameters()}
    for name, parameter in network.named_parameters():
        decays = parameter.ndim == 2 and "embedding" not in name
        rule = "Muon" if decays and isinstance(config, Muon) else "AdamW"
        decay = (0.2 if isinstance(config, Muon) else 0.3) if decays else 0.0
        assert found[name] == (rule, decay), name


def test_stacked_experts_and_the_head_stay_with_adam():
    experts = Experts(
        num_experts=4, num_chosen=2, expert=FeedForward(width=8, activation="silu"), router=Router(score="softmax")
    )
    config = ModelConfig(
        width=WIDTH, context=CONTEXT, decoder=stack(grouped(), feed_forward=experts), head=Head(tied=False)
    )
    found = groups_of(toy(config), Muon())
    assert found["decoder.layers.0.feed_forward.up"][0] == "AdamW"
    assert found["head.weight"][0] == "AdamW"
    assert found["decoder.layers.0.attention.query.weight"][0] == "Muon"


def test_one_step_of_adam_is_the_formula():
    network = torch.nn.Linear(3, 2, bias=False)
    weight = network.weight.detach().clone()
    (optimizer,) = build_optimizers(network, AdamW(learning_rate=0.1, weight_decay=0.5, epsilon=1e-8))
    network(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(network.weight.detach(), weight * (1 - 0.1 * 0.5) - 0.1)  # every gradient is 1


def test_rates_follow_the_schedule():
    optimizers = build_optimizers(toy(decoder()), Muon(learning_rate=0.02, rest=AdamW(learning_rate=0.001)))
    set_rates(optimizers, 0.5)
    set_rates(optimizers, 0.25)  # of the full rate, not of the last one
    assert {group["lr"] for optimizer in optimizers for group in optimizer.param_groups} == {0.005, 0.00025}


def test_frozen_weights_are_left_out():
    network = toy(decoder())
    network.requires_grad_(False)
    network.decoder.layers[0].attention.query.weight.requires_grad_(True)
    assert list(groups_of(network, AdamW())) == ["decoder.layers.0.attention.query.weight"]


def test_a_momentum_of_one_is_refused():
    with pytest.raises(ClearheadError, match=r"momentum is 1\.0; it must be below 1"):
        Muon(momentum=1.0)
