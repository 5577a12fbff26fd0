"""Test weight and cache bytes against the models and caches of transformers."""

import pytest
import torch
import transformers

from clearhead.backends import is_sensitive
from clearhead.backends.modules import pack_network
from clearhead.benchmark.memory_traffic import (
    cache_bytes_read,
    read_bandwidth,
    total_weight_bytes,
    weight_bytes_read,
)
from clearhead.checkpoint.huggingface import save_folder
from clearhead.families import family_of_type
from clearhead.families.settings import Settings
from clearhead.model.transformer import Transformer
from tests.checkpoint.tiny import tiny_network
from tests.verification.models import STYLES, toy_model


def load_in_transformers(network, folder):
    save_folder(network, folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def num_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_bytes_of_a_dense_model(tied, dtype, tmp_path):
    network = tiny_network(tied=tied).to(dtype)
    reference = load_in_transformers(network, tmp_path)
    assert total_weight_bytes(network) == num_bytes(reference.parameters())
    embedding = 0 if tied else num_bytes([reference.get_input_embeddings().weight])
    assert weight_bytes_read(network) == num_bytes(reference.parameters()) - embedding


def test_only_the_chosen_experts_are_read():
    config = {
        "model_type": "qwen3_moe", "vocab_size": 61, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 40, "moe_intermediate_size": 64,
        "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "tie_word_embeddings": True,
    }  # fmt: skip
    network = Transformer(family_of_type("qwen3_moe").read_config(Settings(config, "toy")))
    experts = 2 * 8 * 3 * 64 * 64  # layers, experts, matrices, rows, columns
    assert total_weight_bytes(network) - weight_bytes_read(network) == experts * 4 * 6 // 8
    pack_network(network, "int8")
    assert total_weight_bytes(network) - weight_bytes_read(network) == experts * 8.5 / 8 * 6 / 8


@pytest.mark.parametrize(("bits", "bits_per_weight"), [("int8", 8.5), ("int4", 5.0)])
def test_weight_bytes_of_packed_weights(bits, bits_per_weight):
    """32 values share a scale in float16 and, in 4 bits, an offset; sensitive matrices keep 8 bits."""
    network = tiny_network(width=64, feed_forward=128)
    matrices = {name: tensor.numel() for name, tensor in network.named_parameters() if tensor.ndim > 1}
    sensitive = sum(number for name, number in matrices.items() if is_sensitive(network.config, name))
    assert 0 < sensitive < sum(matrices.values())
    norms = num_bytes(tensor for tensor in network.parameters() if tensor.ndim == 1)
    expected = ((sum(matrices.values()) - sensitive) * bits_per_weight + sensitive * 8.5) / 8 + norms
    assert weight_bytes_read(pack_network(network, bits)) == expected


@pytest.mark.parametrize("style", ["llama", "mistral", "gemma3", "deepseek", "gpt2"])
@pytest.mark.parametrize("length", [7, 25])
@torch.no_grad()
def test_cache_bytes_equal_those_of_transformers(style, length, tmp_path):
    network = toy_model(style).network
    reference = load_in_transformers(network, tmp_path)
    cache = transformers.DynamicCache(config=reference.config)
    tokens = torch.randint(0, 61, (1, length), generator=torch.Generator().manual_seed(0))
    for token in tokens[0]:
        reference(input_ids=token.view(1, 1), past_key_values=cache)
    expected = num_bytes(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))
    slides = style in ("mistral", "gemma3") and length > 11  # transformers keeps one token less than the window
    actual = cache_bytes_read(STYLES[style](), length, element_bytes=4)
    assert actual == expected if not slides else expected < actual < expected * 1.2


def test_bandwidth_is_plausible():
    assert 1e7 < read_bandwidth("cpu", num_bytes=1 << 22) < 1e13
