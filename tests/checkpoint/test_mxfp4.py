"""MXFP4 weights of Hugging Face folders are read as in transformers, or kept packed; damaged ones are rejected."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from clearhead.checkpoint.huggingface import load_folder
from clearhead.checkpoint.interface import LoadOptions
from clearhead.checkpoint.mxfp4 import Mxfp4Experts
from clearhead.errors import ClearheadError
from tests.parity.decoder_cases import SETTINGS, build
from tests.parity.harness import randomize

SETTINGS_OF_32 = SETTINGS["gpt_oss"][0] | {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1}
EXPERTS = "model.layers.0.mlp.experts"
SHAPES = {"gate_up_proj": (6, 64, 2), "down_proj": (6, 64, 1)}  # experts, rows, blocks in a row


def random_blocks(*shape):
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(120, 128, shape, dtype=torch.uint8, generator=generator)


def test_every_byte_and_exponent_is_read_as_transformers_reads_it():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 4, 4, 16)
    scales = torch.tensor([1, 64, 120, 127, 128, 130, 180, 250] * 2, dtype=torch.uint8).reshape(1, 4, 4)
    assert torch.equal(
        Mxfp4Experts(blocks, scales).dequantize(), convert_moe_packed_tensors(blocks.clone(), scales.clone())
    )


@pytest.fixture
def folder(tmp_path):
    """Return a folder of gpt-oss with packed experts."""
    write_folder(tmp_path)
    return tmp_path


def write_folder(folder):
    """Write a gpt-oss whose experts are in MXFP4."""
    torch.manual_seed(0)
    model = build("gpt_oss", **SETTINGS_OF_32)()
    randomize(model)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, shape in SHAPES.items():
        del tensors[f"{EXPERTS}.{name}"]
        tensors[f"{EXPERTS}.{name}_blocks"], tensors[f"{EXPERTS}.{name}_scales"] = random_blocks(*shape)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))


def expected_weights():
    """Return the gate, up and down projections of all experts in the fixture, (E, out, in)."""
    fused, down = (Mxfp4Experts(*random_blocks(*shape)).dequantize().float().mT for shape in SHAPES.values())
    return {"gate": fused[:, ::2], "up": fused[:, 1::2], "down": down}


def test_a_folder_with_packed_experts_loads(folder):
    with pytest.warns(UserWarning, match=r"2 matrices in MXFP4 were dequantized to float32"):
        network = load_folder(folder).network
    weights = network.state_dict()
    for name, expected in expected_weights().items():
        assert torch.equal(weights[f"decoder.layers.0.feed_forward.{name}"], expected)


def test_packed_experts_are_kept_in_five_bits_without_a_change(folder):
    network = load_folder(folder, LoadOptions(weights="stored")).network
    experts = network.decoder.layers[0].feed_forward
    for name, expected in expected_weights().items():
        packed = getattr(experts, name).packed
        assert packed.high_bits is not None
        assert torch.equal(packed.unpack(), expected.flatten(0, 1))
        if expected.shape[-1] % 64 == 0:  # otherwise rows are padded
            assert packed.num_bytes * 8 == expected.numel() * 5.5 + packed.high_bits.numel() * 8 - expected.numel()
    with pytest.warns(UserWarning, match="dequantized"):
        full = load_folder(folder).network
    tokens = torch.tensor([[1, 5, 9, 3, 8, 2]])
    with torch.inference_mode():
        found, wanted = network(tokens), full(tokens)
    assert (found - wanted).norm() / wanted.norm() < 0.05  # the kernels round the other factor to 8 bits


def test_scales_that_float16_does_not_have_are_dequantized():
    blocks, scales = random_blocks(2, 3, 2)
    assert Mxfp4Experts(blocks, scales).pack() is not None
    scales[1, 2, 1] = 100
    assert Mxfp4Experts(blocks, scales).pack() is None
    blocks[1, 2, 1] = 0  # zeros have no scale
    packed = Mxfp4Experts(blocks, scales).pack()
    assert packed is not None
    assert torch.equal(packed.unpack(), Mxfp4Experts(blocks, scales).dequantize().float().mT.flatten(0, 1))


def test_scales_of_another_shape_are_rejected(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{EXPERTS}.down_proj_scales"] = tensors[f"{EXPERTS}.down_proj_scales"][:5].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ClearheadError, match="do not fit scales of shape"):
        load_folder(folder)


def test_blocks_without_a_declaration_are_rejected(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ClearheadError, match="lacks the tensors"):
        load_folder(folder)
