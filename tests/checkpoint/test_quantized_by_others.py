"""Folders whose weights other libraries quantized and dequantize: compressed-tensors, and transformers' FP8 blocks."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations import finegrained_fp8

from clearhead.checkpoint import LoadOptions, open_model, save_folder
from tests.checkpoint.quantized_files import quantize_folder
from tests.checkpoint.tiny import tiny_network

SCHEMES = {
    "pack-quantized": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
    "pack-quantized in 8 bits": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "int-quantized": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
}


@pytest.fixture
def folder(tmp_path):
    save_folder(tiny_network(width=64, feed_forward=96), tmp_path)
    return tmp_path


def projections(network):
    """Return the weights of the linear layers of a network, by the names of LLaMA's checkpoints."""
    ours = {"self_attn.q_proj": "attention.query", "self_attn.o_proj": "attention.output"}
    ours |= {f"mlp.{part}_proj": f"feed_forward.{part}" for part in ("gate", "up", "down")}
    return {
        f"model.layers.{layer}.{theirs}": network.get_parameter(f"decoder.layers.{layer}.{own}.weight")
        for layer in range(2)
        for theirs, own in ours.items()
    }


def read(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which matrices were dequantized
        return open_model(folder, LoadOptions(dtype=torch.float32)).network


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_compressed_by_compressed_tensors(folder, name):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**SCHEMES[name], observer=None)
    )
    kind = name.split()[0]
    compressor = compressors.BaseCompressor.get_value_from_registry(kind)
    largest = {("int", 4): 7.0, ("int", 8): 127.0, ("float", 8): 448.0}[
        SCHEMES[name]["type"], SCHEMES[name]["num_bits"]
    ]
    stored, expected = load_file(folder / "model.safetensors"), {}
    for tensor_name in [each for each in stored if each.endswith("_proj.weight")]:
        weight, module = stored.pop(tensor_name), tensor_name.removesuffix(".weight")
        groups = weight.unflatten(1, (-1, SCHEMES[name].get("group_size", weight.shape[1])))
        state = {"weight": weight, "weight_scale": groups.abs().amax(-1) / largest}
        parts = compressor.compress(state, scheme)
        expected[module] = compressor.decompress(dict(parts), scheme)["weight"].float()
        assert 0 < float((expected[module] - weight).abs().max()) < 0.2
        stored |= {f"{module}.{end}": part.contiguous() for end, part in parts.items() if part is not None}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": SCHEMES[name], "input_activations": None}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    for module, weight in projections(read(folder)).items():
        theirs = expected[module]
        assert torch.allclose(weight, theirs, rtol=1e-6, atol=1e-7), module


def test_fp8_blocks_are_dequantized_as_transformers_does(folder):
    quantize_folder(folder, "fp8 blocks")
    stored = load_file(folder / "model.safetensors")
    for module, weight in projections(read(folder)).items():
        theirs = finegrained_fp8._dequantize_fp8_weight(
            stored[f"{module}.weight"], stored[f"{module}.weight_scale_inv"], [32, 64], torch.float32
        )
        assert torch.equal(weight, theirs), module
