"""Test low-rank adapters: no effect at the start, the only trained weights, and merged at the end."""

import pytest
import torch

import clearhead
from clearhead.checkpoint import read_adapter
from clearhead.errors import ClearheadError
from clearhead.training.loop import train
from clearhead.training.lora import Lora, LoraLinear, add_lora, merge_lora
from clearhead.training.recipe import resolve_recipe
from tests.model.toys import assert_close, decoder, some_tokens, toy
from tests.training.recipes import LANGUAGE_MODEL, SMALL, quiet_console, run


def adapted(**changes):
    network = toy(decoder())
    torch.manual_seed(0)
    add_lora(network, Lora(**({"rank": 2, "targets": ("query", "down")} | changes)))
    return network


def randomize_adapters(network):
    with torch.no_grad():
        for part in network.modules():
            if isinstance(part, LoraLinear):
                part.expand.normal_()


def test_new_adapters_do_not_change_the_output():
    assert_close(adapted()(some_tokens()), toy(decoder())(some_tokens()))


def test_only_the_adapters_are_trained():
    network = adapted()
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert trained == {
        f"decoder.layers.{number}.{layer}.{part}"
        for number in (0, 1)
        for layer in ("attention.query", "feed_forward.down")
        for part in ("reduce", "expand")
    }


def test_the_adapter_computes_the_formula_and_merging_keeps_the_output():
    network = adapted(alpha=3.0)
    randomize_adapters(network)
    part = network.get_submodule("decoder.layers.0.attention.query")
    weight = part.base.weight + 3.0 / 2 * part.expand @ part.reduce
    x = torch.randn(5, weight.shape[1], dtype=torch.float64)
    assert_close(part(x), torch.nn.functional.linear(x, weight, part.base.bias))
    before = network(some_tokens())
    merge_lora(network)
    assert_close(network(some_tokens()), before)
    assert [name for name, _ in network.named_parameters()] == [n for n, _ in toy(decoder()).named_parameters()]
    assert all(parameter.requires_grad for parameter in network.parameters())


def test_dropout_affects_the_adapter_only():
    network = adapted(dropout=0.5).train()
    assert_close(network(some_tokens()), toy(decoder())(some_tokens()))
    randomize_adapters(network)
    assert not torch.equal(network(some_tokens()), network(some_tokens()))


@pytest.mark.parametrize(
    ("targets", "message"),
    [(("qkv",), "'qkv'"), (("query", "valu"), "'valu'; did you mean 'value'"), (("gate",), "'gate'")],
)
def test_a_target_that_no_layer_has_is_rejected(targets, message):
    with pytest.raises(ClearheadError, match=f"unknown linear layer of this model: {message}"):
        adapted(targets=targets)


def test_a_run_saves_the_adapter_alone_and_it_loads_as_the_merged_model(tmp_path):
    text = {"data": {"path": str(tmp_path / "text.txt")}}
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question: " * 20)
    base = run(tmp_path / "base", LANGUAGE_MODEL, text, {"train": {"steps": 2}}).folder / "model"
    console = quiet_console()
    layers = [("recipe", layer) for layer in (SMALL, LANGUAGE_MODEL, text)]
    tuned = {"model": {"kind": "loaded_model", "name": str(base)}, "tokenizer": None, "lora": {"rank": 2, "alpha": 4.0}}
    recipe = resolve_recipe([*layers, ("recipe", {**tuned, "train": {"steps": 3}})])
    result = train(recipe, tmp_path / "tuned", console)
    trained = sum(a.numel() + b.numel() for a, b in read_adapter(result.folder / "adapter").matrices.values())
    assert f"{trained:,} of them trained" in console.file.getvalue()
    assert "in adapters of rank 2" in console.file.getvalue()
    assert "adapter alone" in console.file.getvalue()
    merged, loaded = (clearhead.load(result.folder / name, fast=False) for name in ("model", "adapter"))
    before = dict(clearhead.load(base, fast=False).network.named_parameters())
    changed = 0
    for (name, one), other in zip(merged.network.named_parameters(), loaded.network.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
        changed += not torch.equal(one, before[name])
    assert changed
    assert loaded.generate("to be", max_new_tokens=3).tokens == merged.generate("to be", max_new_tokens=3).tokens
