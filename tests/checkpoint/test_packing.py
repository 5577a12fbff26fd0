"""Weights packed while loading equal weights packed afterwards, for every kind of module that has a packed form."""

import pytest
import torch

import clearhead
from clearhead.backends.modules import pack_network
from clearhead.checkpoint.huggingface import load_folder, save_folder
from clearhead.checkpoint.interface import LoadOptions
from clearhead.checkpoint.native import load_native, save_native
from clearhead.model.transformer import Transformer
from tests.model.toys import redraw
from tests.toy_presets import shrink

# Separate, fused and transposed projections, experts stored one by one, latent attention, a separate output matrix,
# token tables shared by encoder, decoder and head, and a head with a layer of its own.
PRESETS = ("llama-3.1-8b", "gpt2", "qwen3-30b-a3b", "deepseek-v3", "t5-v1.1-small", "marian", "bert-base")


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("name", PRESETS)
def test_packing_while_loading_equals_packing_afterwards(tmp_path, name, bits):
    torch.manual_seed(0)
    network = Transformer(shrink(clearhead.preset(name))).eval()
    redraw(network)
    save_folder(network, tmp_path / "huggingface")
    save_native(network, tmp_path / "native")
    for load, folder in ((load_folder, tmp_path / "huggingface"), (load_native, tmp_path / "native")):
        expected = pack_network(load(folder, LoadOptions(dtype=torch.bfloat16)).network, bits)
        packed = load(folder, LoadOptions(dtype=torch.bfloat16, weights=bits)).network
        assert {part: type(module) for part, module in packed.named_modules()} == {
            part: type(module) for part, module in expected.named_modules()
        }
        assert packed.state_dict().keys() == expected.state_dict().keys()
        for tensor_name, tensor in packed.state_dict().items():
            assert torch.equal(tensor, expected.state_dict()[tensor_name]), tensor_name
        assert not any(tensor.is_meta for tensor in (*packed.parameters(), *packed.buffers()))
        assert not any(module.training for module in packed.modules())
        tokens = torch.tensor([[1, 2, 3, 4, 5]])
        inputs = (tokens, tokens) if packed.config.is_encoder_decoder else (tokens,)
        with torch.no_grad():
            assert torch.equal(packed(*inputs), expected(*inputs))
