"""Every GGUF architecture of our table: written, read back, and compared with the gguf package and transformers."""

import gguf
import numpy as np
import pytest
import torch
import transformers

from clearhead.architecture import SlidingWindow
from clearhead.backends.modules import PackedMatrix
from clearhead.checkpoint.formats import open_model
from clearhead.checkpoint.gguf import open_gguf
from clearhead.checkpoint.gguf_save import save_gguf
from clearhead.checkpoint.interface import LoadOptions
from clearhead.errors import ClearheadError
from clearhead.families import GGUF_ARCHITECTURES
from tests.checkpoint.gguf_toys import PRESETS, ROWS, STORED_AS_BERT, STORED_NAMES, toy_network, write_toy
from tests.checkpoint.test_gguf_model import write_file

FLOAT32 = LoadOptions(dtype=torch.float32)
ARCHITECTURES = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}


def test_every_architecture_has_a_toy():
    assert {ROWS.get(name, name) for name in PRESETS} == GGUF_ARCHITECTURES.keys()


@pytest.mark.parametrize("architecture", PRESETS)
def test_a_written_file_is_the_same_model_and_has_the_names_of_llama_cpp(tmp_path, architecture):
    network, path = toy_network(architecture), tmp_path / "model.gguf"
    write_toy(path, network, architecture)
    again = open_model(path, FLOAT32).network
    assert again.config == network.config
    for name, parameter in network.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    _check_names(path, STORED_NAMES.get(architecture, architecture))


@pytest.mark.parametrize("model_type", STORED_AS_BERT)
def test_encoders_that_llama_cpp_stores_as_bert_compute_the_same_as_one(tmp_path, model_type):
    network, path = toy_network(model_type), tmp_path / "model.gguf"
    write_toy(path, network, model_type)
    loaded = open_model(path, FLOAT32)
    assert loaded.family.name == "bert"
    assert loaded.network.config.context == network.config.context
    tokens = torch.randint(2, 300, (2, network.config.context), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(loaded.network.encode(tokens).states, network.encode(tokens).states)
    _check_names(path, "bert")


def test_a_model_is_written_as_its_own_architecture_if_others_express_it_too(tmp_path):
    for name in (*PRESETS, *STORED_AS_BERT):
        save_gguf(tmp_path / "model.gguf", toy_network(name), None)
        expected = "bert" if name in STORED_AS_BERT else STORED_NAMES.get(name, name)
        expected = {"seed_oss": "qwen2"}.get(name, expected)  # the same network
        assert open_gguf(tmp_path / "model.gguf").metadata["general.architecture"] == expected, name


def _check_names(path, expected_name):
    """Compare the names of architecture and tensors with those of the gguf package."""
    file = gguf.GGUFReader(path)
    stored_name = file.fields["general.architecture"].contents()
    assert stored_name == expected_name
    known = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[ARCHITECTURES[stored_name]]}
    for tensor in file.tensors:
        parts = tensor.name.rpartition(".")[0].split(".")
        pattern = ".".join("{bid}" if part.isdecimal() else part for part in parts)
        assert pattern in known, tensor.name


# transformers reads these completely; of others it ignores settings, so that llama.cpp is the judge (tests/slow).
READ_BY_TRANSFORMERS = ["llama", "nemotron", "qwen2moe", "stablelm", "qwen3moe"]


@pytest.mark.parametrize("architecture", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_logits(tmp_path, architecture):
    network, path = toy_network(architecture), tmp_path / "model.gguf"
    write_toy(path, network, architecture)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.randint(0, 300, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (network(tokens) - theirs(tokens).logits).abs().max() <= 2e-5


@pytest.mark.parametrize("file_type", ["q8_0", "q4_0"])
def test_experts_are_kept_in_their_blocks(tmp_path, file_type):
    path = tmp_path / "model.gguf"
    write_toy(path, toy_network("qwen3moe"), "qwen3moe", file_type=file_type)
    packed, full = (
        open_model(path, LoadOptions(dtype=torch.float32, weights=kind)).network for kind in ("stored", "full")
    )
    for part in ("gate", "up", "down"):
        stored = getattr(packed.decoder.layers[0].feed_forward, part)
        assert isinstance(stored, PackedMatrix)
        plain = getattr(full.decoder.layers[0].feed_forward, part)
        assert torch.equal(stored.packed.unpack(), plain.detach().flatten(0, 1))


def _rewrite(path, architecture, keys, tensors):
    """Write changed.gguf beside a file, with further keys and tensors."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_name("changed.gguf"), architecture)
    for name, field in reader.fields.items():
        if name.startswith(f"{architecture}.") and name.removeprefix(f"{architecture}.") not in keys:
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if is_array else None)
    for key, value in keys.items():
        kind = gguf.GGUFValueType.get_type(value)
        of_elements = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(f"{architecture}.{key}", value, kind, of_elements)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name("changed.gguf")


def test_olmo3_as_the_converter_of_llama_cpp_writes_it(tmp_path):
    """It lists which layers have a window, where we write their distance."""
    network, path = toy_network("olmo3"), tmp_path / "model.gguf"
    write_toy(path, network, "olmo3")
    windowed = [isinstance(layer.attention.pattern, SlidingWindow) for layer in network.config.decoder.layers]
    assert 0 < sum(windowed) < len(windowed)
    changed = _rewrite(path, "olmo2", {"attention.sliding_window_pattern": windowed}, {})
    assert open_model(changed).network.config == network.config


def test_an_unused_table_of_early_t5_files_is_ignored(tmp_path):
    network, path = toy_network("t5"), tmp_path / "model.gguf"
    write_toy(path, network, "t5")
    changed = _rewrite(path, "t5", {}, {"dec.blk.0.cross_attn_rel_b.weight": np.zeros((32, 4), np.float32)})
    assert open_model(changed).network.config == network.config


def test_what_a_graph_of_llama_cpp_does_not_compute_is_refused(tmp_path):
    wrong = {"granite": ("attn_logit_softcapping", 30.0), "smollm3": ("attention.sliding_window", 8)}
    for architecture, (key, value) in wrong.items():
        network, path = toy_network(architecture), tmp_path / f"{architecture}.gguf"
        write_toy(path, network, architecture)
        _rewrite(path, architecture, {key: value}, {})
        with pytest.raises(ClearheadError, match=key.replace(".", r"\.")):
            open_model(tmp_path / "changed.gguf")


def test_a_llama_file_with_experts_is_a_mixtral_and_others_are_not(tmp_path):
    write_toy(tmp_path / "experts.gguf", toy_network("mixtral"), "mixtral")
    assert open_model(tmp_path / "experts.gguf").family.name == "mixtral"
    assert open_model(write_file(tmp_path / "dense.gguf", "llama")).family.name == "llama"
