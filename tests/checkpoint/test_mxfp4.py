"""MXFP4 weights of Hugging Face folders are read as transformers dequantizes them; damaged ones are rejected."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from clearhead.checkpoint.huggingface import load_folder
from clearhead.checkpoint.mxfp4 import dequantize_mxfp4
from clearhead.errors import ClearheadError
from tests.parity.decoder_cases import SETTINGS, build
from tests.parity.harness import randomize

SETTINGS_OF_32 = SETTINGS["gpt_oss"][0] | {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1}
EXPERTS = "model.layers.0.mlp.experts"


def random_blocks(*shape):
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(120, 128, shape, dtype=torch.uint8, generator=generator)


def test_every_byte_and_exponent_is_read_as_transformers_reads_it():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 4, 4, 16)
    scales = torch.tensor([1, 64, 120, 127, 128, 130, 180, 250] * 2, dtype=torch.uint8).reshape(1, 4, 4)
    assert torch.equal(dequantize_mxfp4(blocks, scales), convert_moe_packed_tensors(blocks.clone(), scales.clone()))


@pytest.fixture
def folder(tmp_path):
    """Return a folder of gpt-oss with packed experts, and the values of one of its matrices."""
    model = build("gpt_oss", **SETTINGS_OF_32)()
    randomize(model)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, shape in ((f"{EXPERTS}.gate_up_proj", (6, 64, 2)), (f"{EXPERTS}.down_proj", (6, 64, 1))):
        del tensors[name]
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = random_blocks(*shape)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_a_folder_with_packed_experts_loads(folder):
    network = load_folder(folder).network
    expected = dequantize_mxfp4(*random_blocks(6, 64, 2)).float()  # (E, D, 2F), gate and up alternate
    assert torch.equal(network.state_dict()["decoder.layers.0.feed_forward.up"], expected[..., 1::2].transpose(1, 2))
    down = dequantize_mxfp4(*random_blocks(6, 64, 1)).float()
    assert torch.equal(network.state_dict()["decoder.layers.0.feed_forward.down"], down.transpose(1, 2))


def test_scales_of_another_shape_are_rejected(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{EXPERTS}.down_proj_scales"] = tensors[f"{EXPERTS}.down_proj_scales"][:5].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ClearheadError, match="do not fit scales of shape"):
        load_folder(folder)
