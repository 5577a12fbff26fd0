"""Low-rank additions: nothing at the start, all of the training, nothing left but ordinary weights at the end."""

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.training.lora import Lora, LoraLinear, add_lora, merge_lora
from tests.model.toys import close, decoder, some_tokens, toy


def adapted(**changes):
    network = toy(decoder())
    torch.manual_seed(0)
    add_lora(network, Lora(**({"rank": 2, "targets": ("query", "down")} | changes)))
    return network


def disturb(network):
    with torch.no_grad():
        for part in network.modules():
            if isinstance(part, LoraLinear):
                part.expand.normal_()


def test_training_starts_at_the_model_as_it_was():
    close(adapted()(some_tokens()), toy(decoder())(some_tokens()))


def test_only_the_additions_are_trained():
    network = adapted()
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert trained == {
        f"decoder.layers.{number}.{place}.{part}"
        for number in (0, 1)
        for place in ("attention.query", "feed_forward.down")
        for part in ("reduce", "expand")
    }


def test_the_addition_is_the_formula_and_merging_changes_nothing():
    network = adapted(alpha=3.0)
    disturb(network)
    part = network.get_submodule("decoder.layers.0.attention.query")
    weight = part.base.weight + 3.0 / 2 * part.expand @ part.reduce
    x = torch.randn(5, weight.shape[1], dtype=torch.float64)
    close(part(x), torch.nn.functional.linear(x, weight, part.base.bias))
    before = network(some_tokens())
    merge_lora(network)
    close(network(some_tokens()), before)
    assert [name for name, _ in network.named_parameters()] == [n for n, _ in toy(decoder()).named_parameters()]
    assert all(parameter.requires_grad for parameter in network.parameters())


def test_dropout_is_on_the_addition_alone():
    network = adapted(dropout=0.5).train()
    close(network(some_tokens()), toy(decoder())(some_tokens()))
    disturb(network)
    assert not torch.equal(network(some_tokens()), network(some_tokens()))


@pytest.mark.parametrize(
    ("targets", "named"),
    [(("qkv",), "'qkv'"), (("query", "valu"), "'valu'; did you mean 'value'"), (("gate",), "'gate'")],
)
def test_a_name_that_no_layer_has_is_refused(targets, named):
    with pytest.raises(ClearheadError, match=f"unknown linear layer of this model: {named}"):
        adapted(targets=targets)
