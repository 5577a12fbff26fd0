"""Quantized Hugging Face folders are read as the libraries that write them dequantize them; others are rejected."""

import json
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import clearhead
from clearhead.backends import PackedLinear
from clearhead.checkpoint import LoadOptions, open_model, read_config
from clearhead.checkpoint.quantized_folder import read_quantization
from clearhead.checkpoint.quantized_formats import dequantize_float8
from clearhead.errors import ClearheadError
from clearhead.families import Settings
from tests.checkpoint.quantized_files import QUANTIZERS, quantize_folder

PROJECTION = "model.layers.0.mlp.down_proj"
KEPT_PACKED = ("gptq", "awq", "pack-quantized")


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a small Llama and random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=40, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def load_quietly(folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return open_model(folder, LoadOptions(**options))


def reference(folder, expected):
    """Return the model of transformers with the dequantized weights."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    stored = load_file(folder / "model.safetensors")
    state = {name: expected.get(name, stored.get(name)) for name in model.state_dict()}
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_folder_loads_as_its_dequantized_weights(folder, name):
    expected = quantize_folder(folder, name)
    with pytest.warns(UserWarning, match=r"14 matrices in .* were dequantized to float32"):
        network = open_model(folder).network
    tokens = torch.randint(0, 40, (2, 9))
    with torch.no_grad():
        difference = (network(tokens) - reference(folder, expected)(tokens).logits).abs().max()
    assert difference <= 1e-5
    down = network.get_parameter("decoder.layers.0.feed_forward.down.weight")
    assert torch.allclose(down, expected[f"{PROJECTION}.weight"], rtol=1e-6, atol=0)
    assert read_config(folder) == network.config


@pytest.mark.parametrize("name", QUANTIZERS)
def test_stored_weights_are_kept_packed_where_a_kernel_takes_them(folder, name):
    expected = quantize_folder(folder, name)
    network = load_quietly(folder, weights="stored", dtype=torch.float32).network
    down = network.get_submodule("decoder.layers.0.feed_forward.down")
    assert isinstance(down, PackedLinear) == (name in KEPT_PACKED)
    # the offsets of formats with zeros are float16
    assert (down.weight - expected[f"{PROJECTION}.weight"]).abs().max() <= 1e-3 * down.weight.abs().max()
    if name == "pack-quantized":
        assert torch.equal(down.weight, expected[f"{PROJECTION}.weight"])


def test_full_weights_are_not_stored_blocks(folder):
    with pytest.raises(ClearheadError, match="has no stored blocks, which only"):
        open_model(folder, LoadOptions(weights="stored"))


def test_a_config_that_kept_its_declaration_after_dequantizing_loads_silently(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZERS["gptq"].config}))
    assert open_model(folder).network.config.vocab_size == 40


@pytest.mark.parametrize(
    ("name", "end", "change", "message"),
    [
        ("gptq", "qweight", lambda t: t.float(), "matrix of int32"),
        ("gptq", "scales", lambda t: t[:1], "do not fit together"),
        ("gptq", "qzeros", lambda t: None, "lacks the tensor"),
        ("gptq", "g_idx", lambda t: t + 7, "group that does not exist"),
        ("gptq", "g_idx", lambda t: t[:5], "g_idx does not fit"),
        ("awq", "qzeros", lambda t: t[:, :3], "do not fit together"),
        ("pack-quantized", "weight_shape", lambda t: t + 1, "cannot be read"),
        ("pack-quantized", "weight_scale", lambda t: t[:3], "weight_scale does not fit"),
        ("float-quantized", "weight_scale", lambda t: t[:3], "do not fit"),
        ("fp8 blocks", "weight_scale_inv", lambda t: t[:1], "its scales have shape"),
        ("int8", "SCB", lambda t: t[:3], "SCB must have a float32 for each"),
        ("int8", "weight_format", lambda t: t + 2, "weight_format is not 0"),
        ("nf4", "weight.absmax", lambda t: t[:3], "absmax does not fit"),
        ("nf4", "weight.quant_map", lambda t: t[:3], "does not fit"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda t: t[:9], "quant_state is not JSON"),
    ],
)
def test_parts_that_do_not_fit_are_rejected(folder, name, end, change, message):
    quantize_folder(folder, name)
    stored = load_file(folder / "model.safetensors")
    changed = change(stored.pop(f"{PROJECTION}.{end}"))
    if changed is not None:
        stored[f"{PROJECTION}.{end}"] = changed.contiguous()
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ClearheadError, match=message):
        load_quietly(folder)


def test_blocks_larger_than_a_matrix_take_no_more_memory():
    weight = torch.ones(3, 5).to(torch.float8_e4m3fn)
    values = dequantize_float8(weight, torch.tensor([[2.0]]), (1 << 50, 1 << 50))
    assert torch.equal(values, torch.full((3, 5), 2.0))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"quant_method": "gptq"}, "'bits'"),
        ({"quant_method": "gptq", "bits": 3}, "'bits'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'checkpoint_format'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"a": {}}}, "dynamic"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'version'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "in the format 'marlin-24' are not supported"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "block size must be two whole numbers"),
    ],
)
def test_methods_that_are_not_supported_are_rejected(declared, message):
    with pytest.raises(ClearheadError, match=message):
        read_quantization(Settings({"quantization_config": declared}, "config.json"))


def test_a_quantized_folder_generates(folder):
    expected = quantize_folder(folder, "awq")
    with pytest.warns(UserWarning, match="dequantized"):
        model = clearhead.load(folder, fast=False)
    prompt = [3, 1, 4, 1, 5]
    theirs = reference(folder, expected)
    output = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    model.special_ids.clear()
    assert model.generate(prompt, max_new_tokens=12).tokens == output[0, 5:].tolist()


# --- the libraries themselves, where they are installed


def test_bitsandbytes_dequantizes_the_same_numbers():
    functional = pytest.importorskip("bitsandbytes.functional")
    from clearhead.checkpoint.quantized_formats import dequantize_row_int8, dequantize_table_int4

    weight = torch.randn(64, 320, generator=torch.Generator().manual_seed(0))
    for quant_type in ("nf4", "fp4"):
        for nested in (False, True):
            stored, state = functional.quantize_4bit(weight, quant_type=quant_type, compress_statistics=nested)
            parts = {"weight": stored} | {f"weight.{end}": part for end, part in state.as_dict(packed=True).items()}
            expected = functional.dequantize_4bit(stored, state)
            assert torch.allclose(dequantize_table_int4(parts), expected, rtol=1e-6, atol=1e-7), (quant_type, nested)
    stored, largest, _ = functional.int8_vectorwise_quant(weight.half())
    expected = functional.int8_vectorwise_dequant(stored, largest)
    assert torch.allclose(dequantize_row_int8(stored, largest), expected.float(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_unpacks_the_same_numbers(bits, symmetric):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    from clearhead.checkpoint.quantized_formats import packed_int_groups

    generator = torch.Generator().manual_seed(0)
    low, high = -(1 << bits - 1), 1 << bits - 1
    quants = torch.randint(low, high, (24, 72), dtype=torch.int8, generator=generator)
    zeros = torch.randint(low, high, (24, 3), dtype=torch.int8, generator=generator) * (not symmetric)
    scales = torch.rand(24, 3, generator=generator)
    parts = {
        "weight_packed": pack_to_int32(quants, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([24, 72]),
    }
    if not symmetric:
        parts["weight_zero_point"] = pack_to_int32(zeros, bits, packed_dim=0)
    expected = (quants.float() - zeros.float().repeat_interleave(24, 1)) * scales.repeat_interleave(24, 1)
    assert torch.allclose(packed_int_groups(parts, bits=bits).dequantize(), expected, rtol=1e-6)
