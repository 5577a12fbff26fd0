"""Test adapters that are saved without their model."""

import json

import pytest
import torch
from safetensors.torch import save_file

import clearhead
from clearhead.catalog import check_model_files
from clearhead.checkpoint.adapter import Adapter, is_adapter, merge_adapter, read_adapter, save_adapter
from clearhead.errors import ClearheadError
from clearhead.training.lora import Lora, LoraLinear, add_lora, lora_matrices
from tests.model.toys import assert_close, decoder, some_tokens, toy

NAME = "decoder.layers.0.attention.query"


def adapted_network():
    network = toy(decoder())
    torch.manual_seed(0)
    add_lora(network, Lora(rank=2, alpha=3.0))
    with torch.no_grad():
        for part in network.modules():
            if isinstance(part, LoraLinear):
                part.expand.normal_()
    return network


def test_a_saved_adapter_changes_the_base_model_as_the_trained_one(tmp_path):
    network = adapted_network()
    save_adapter(tmp_path / "adapter", Adapter("base", 1.5, lora_matrices(network)))
    assert is_adapter(tmp_path / "adapter")
    base = toy(decoder())
    adapter = read_adapter(tmp_path / "adapter")
    assert (adapter.base, adapter.scale) == ("base", 1.5)
    merge_adapter(base, adapter)
    assert torch.allclose(base(some_tokens()), network(some_tokens()), atol=1e-5)


def test_load_reads_an_adapter_together_with_its_base_model(tmp_path):
    model = clearhead.create(decoder(), seed=1)
    model.save(tmp_path / "base")
    network = clearhead.load(tmp_path / "base").network
    add_lora(network, Lora(rank=2, alpha=2.0))
    with torch.no_grad():
        for part in network.modules():
            if isinstance(part, LoraLinear):
                part.expand.normal_()
    save_adapter(tmp_path / "adapter", Adapter(str(tmp_path / "base"), 1.0, lora_matrices(network)))
    loaded = clearhead.load(tmp_path / "adapter", fast=False)
    assert_close(loaded.network(some_tokens()), network(some_tokens()), 1e-5)
    with pytest.raises(ClearheadError, match="an adapter can be merged only into full weights"):
        clearhead.load(tmp_path / "adapter", weights="int8")


def test_an_adapter_of_another_model_is_rejected_and_changes_nothing():
    network = toy(decoder())
    before = {name: weight.clone() for name, weight in network.named_parameters()}
    good = (
        torch.ones(2, network.get_submodule(NAME).in_features),
        torch.ones(network.get_submodule(NAME).out_features, 2),
    )
    for matrices, message in (
        ({NAME: good, "decoder.nothing": good}, "which base does not have as a full matrix"),
        ({NAME: (good[0][:, :1], good[1])}, "do not fit a weight of shape"),
        ({NAME: (good[0][:1], good[1])}, "do not fit a weight of shape"),
        ({NAME: (good[0][0], good[1])}, "do not fit a weight of shape"),
    ):
        with pytest.raises(ClearheadError, match=message):
            merge_adapter(network, Adapter("base", 1.0, matrices))
    assert all(torch.equal(weight, before[name]) for name, weight in network.named_parameters())


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({}, "does not describe an adapter"),
        ({"format": "clearhead-lora-1", "base": 3, "scale": 1.0}, "does not describe an adapter"),
        ({"format": "clearhead-lora-1", "base": "x", "scale": float("inf")}, "must be finite"),
        ({"format": "clearhead-lora-1", "base": "x", "scale": 1.0}, "must have the tensors `reduce` and `expand`"),
    ],
)
def test_a_damaged_adapter_is_rejected(tmp_path, description, message):
    (tmp_path / "adapter.json").write_text(json.dumps(description))
    save_file({"a.reduce": torch.zeros(1, 1)}, tmp_path / "adapter.safetensors")
    with pytest.raises(ClearheadError, match=message):
        read_adapter(tmp_path)
    (tmp_path / "adapter.safetensors").write_bytes(b"nothing")
    with pytest.raises(ClearheadError):
        read_adapter(tmp_path)


def test_a_name_that_is_too_long_is_not_an_adapter():
    assert not is_adapter("x" * 5000)


def test_the_commands_accept_an_adapter_folder(tmp_path):
    save_adapter(tmp_path, Adapter("base", 1.0, {NAME: (torch.ones(2, 4), torch.ones(4, 2))}))
    check_model_files(tmp_path)
