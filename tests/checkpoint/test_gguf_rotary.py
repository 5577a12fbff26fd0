"""LongRoPE in GGUF files: written, read back, and compared with transformers for texts on both sides of the limit.

test_gguf_model.py and test_gguf_save.py test Llama 3's scaling, which is also stored as a tensor.
"""

from dataclasses import replace

import gguf
import pytest
import torch

from clearhead.architecture import Llama3Scaling, LongRopeScaling, Rope
from clearhead.checkpoint.formats import open_model
from clearhead.checkpoint.gguf_rotary import rotary_tensors
from clearhead.checkpoint.gguf_save import save_gguf
from clearhead.checkpoint.interface import LoadOptions
from clearhead.errors import ClearheadError
from clearhead.model import Transformer
from tests.checkpoint.gguf_toys import (
    SIZES,
    longrope,
    longrope_network,
    toy_config,
    toy_network,
    with_scaling,
    write_toy,
)
from tests.checkpoint.test_gguf_model import write_file
from tests.checkpoint.tiny import same_network, tiny_network
from tests.parity.decoder_cases import VARIANTS
from tests.parity.harness import VOCAB, build_reference, load_network

FLOAT32 = LoadOptions(dtype=torch.float32)
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = torch.ones(8)


@torch.no_grad()
@pytest.mark.parametrize("length", [10, 16, 17, 40])
def test_a_file_gives_the_logits_of_transformers_below_and_above_the_original_context(tmp_path, length):
    model = build_reference(VARIANTS["phi3"][0])  # 16 tokens of original context, and part of each head is rotated
    for parameter in model.parameters():
        parameter.copy_(parameter.half().float())
    network = load_network(model, tmp_path / "folder")
    save_gguf(tmp_path / "model.gguf", network, None, file_type="f16")
    again = open_model(tmp_path / "model.gguf", FLOAT32).network
    tokens = torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))
    assert (again(tokens) - model(tokens).logits).abs().max() <= 1e-5


def test_the_keys_and_tensors_are_those_of_the_converter(tmp_path):
    network, path = longrope_network(original_context=256, context=1024), tmp_path / "model.gguf"
    write_toy(path, network, "phi3")
    file = gguf.GGUFReader(path)
    assert file.fields["phi3.rope.scaling.type"].contents() == "longrope"
    assert file.fields["phi3.rope.scaling.original_context_length"].contents() == 256
    assert file.fields["phi3.rope.scaling.attn_factor"].contents() == 1.125
    scaling = network.config.decoder.layers[0].attention.position.scaling
    found = {tensor.name: tensor.data for tensor in file.tensors if tensor.name.startswith("rope")}
    assert found[LONG].tolist() == pytest.approx(scaling.long_factors)
    assert found[SHORT].tolist() == pytest.approx(scaling.short_factors)
    known = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.PHI3]}
    assert {LONG.removesuffix(".weight"), SHORT.removesuffix(".weight")} <= known
    assert same_network(open_model(path, FLOAT32).network, network)


def rewrite(path, target, changed_tensors, removed_keys=()):
    """Write a file again with other tensors (None: removed) and without some keys."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target, "phi3")
    for name, field in reader.fields.items():
        if name.startswith("phi3") and name not in removed_keys:
            writer.add_key_value(name, field.contents(), field.types[0])
    tensors = {tensor.name: tensor.data for tensor in reader.tensors} | changed_tensors
    for name, data in tensors.items():
        if data is not None:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_a_file_without_keys_has_the_defaults_of_llama_cpp(tmp_path):
    write_toy(tmp_path / "model.gguf", longrope_network(original_context=256, context=1024), "phi3")
    keys = ("type", "original_context_length", "attn_factor")
    path = rewrite(tmp_path / "model.gguf", tmp_path / "older.gguf", {}, [f"phi3.rope.scaling.{key}" for key in keys])
    scaling = open_model(path, FLOAT32).network.config.decoder.layers[0].attention.position.scaling
    assert isinstance(scaling, LongRopeScaling)
    assert (scaling.original_context, scaling.attention_factor) == (1024, 1.0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({SHORT: None}, "a file has either"),
        ({"rope_freqs.weight": FACTORS.numpy()}, "a file has either"),
        ({LONG: None, SHORT: None}, "attn_factor"),
        ({LONG: torch.ones(2, 4).numpy()}, r"shape \(2, 4\)"),
        ({LONG: torch.ones(7).numpy()}, "as many short_factors as long_factors"),
        ({LONG: torch.ones(4).numpy(), SHORT: torch.ones(4).numpy()}, "needs 8"),
        ({LONG: -FACTORS.numpy()}, "greater than 0"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path, changed, message):
    write_toy(tmp_path / "model.gguf", longrope_network(original_context=256, context=1024), "phi3")
    path = rewrite(tmp_path / "model.gguf", tmp_path / "changed.gguf", changed)
    with pytest.raises(ClearheadError, match=message):
        open_model(path)


def test_factors_in_a_file_of_another_architecture_are_refused(tmp_path):
    """llama.cpp reads them only for some architectures."""
    path = write_file(tmp_path / "model.gguf", "llama", extra={LONG: FACTORS, SHORT: FACTORS})
    with pytest.raises(ClearheadError, match="rope_factors_long"):
        open_model(path)


def test_another_model_with_longrope_is_written_as_phi3_or_refused(tmp_path):
    factors = {"short_factors": (1.0, 2.0), "long_factors": (2.0, 3.0)}
    rope = Rope(scaling=LongRopeScaling(**factors, original_context=16, attention_factor=1.25))
    network, path = tiny_network(rope=rope), tmp_path / "model.gguf"
    save_gguf(path, network, None, file_type="f16")
    assert gguf.GGUFReader(path).fields["general.architecture"].contents() == "phi3"
    assert open_model(path, FLOAT32).network.config == network.config
    with pytest.raises(ClearheadError, match="no GGUF architecture"):
        save_gguf(path, Transformer(with_scaling(toy_config("qwen3"), longrope(16))), None)


def test_layers_with_different_scalings_are_refused(tmp_path):
    """A file has one tensor for all layers: the scaling of a later layer may not be lost."""
    config = toy_config("llama")
    scaling = Llama3Scaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=8192)
    last = config.decoder.layers[-1]
    scaled = replace(last, attention=replace(last.attention, position=Rope(theta=500000.0, scaling=scaling)))
    decoder = replace(config.decoder, layers=(*config.decoder.layers[:-1], scaled))
    with pytest.raises(ClearheadError, match="scaled in different ways"):
        save_gguf(tmp_path / "model.gguf", Transformer(replace(config, decoder=decoder)), None)


def test_most_models_have_no_such_tensors():
    assert rotary_tensors(toy_config("phi3")) == {}
    assert rotary_tensors(toy_config("t5")) == {}
    assert toy_network("gpt2").config.context == SIZES.context
