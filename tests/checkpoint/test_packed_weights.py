"""Packed weights in Clearhead's own folders come back with the same bits, and damaged ones are refused."""

import json

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

import clearhead
from clearhead.backends.modules import PackedMatrix, pack_network
from clearhead.checkpoint.formats import open_model
from clearhead.checkpoint.interface import LoadOptions
from clearhead.checkpoint.native import DESCRIPTION_FILE, WEIGHTS_FILE, load_native, save_native
from clearhead.errors import ClearheadError
from clearhead.model.transformer import Transformer
from tests.checkpoint.test_gguf_model import write_file
from tests.checkpoint.test_packing import PRESETS
from tests.checkpoint.tiny import tiny_network
from tests.model.toys import redraw
from tests.toy_presets import shrink


def assert_same_bits(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name
    assert {name: type(module) for name, module in one.named_modules()} == {
        name: type(module) for name, module in other.named_modules()
    }
    for name, module in one.named_modules():
        if isinstance(module, PackedMatrix):
            assert (module.columns, module.dtype) == (
                other.get_submodule(name).columns,
                other.get_submodule(name).dtype,
            )


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_packed_network_is_saved_and_loaded_with_the_same_bits(tmp_path, name, bits):
    torch.manual_seed(0)
    network = Transformer(shrink(clearhead.preset(name))).eval()
    redraw(network)
    packed = pack_network(network.bfloat16(), bits)
    save_native(packed, tmp_path)
    loaded = load_native(tmp_path).network
    assert_same_bits(loaded, packed)
    assert loaded.config == packed.config
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    inputs = (tokens, tokens) if packed.config.is_encoder_decoder else (tokens,)
    with torch.no_grad():
        assert torch.equal(loaded(*inputs), packed(*inputs))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_stored_blocks_of_a_gguf_file_are_saved_with_the_same_bits(tmp_path, kind):
    path = write_file(tmp_path / "model.gguf", "llama", tied=False, kind=gguf.GGMLQuantizationType[kind])
    stored = open_model(path, LoadOptions(weights="stored"))
    save_native(stored.network, tmp_path / "folder", "llama", stored.special_ids)
    assert_same_bits(load_native(tmp_path / "folder").network, stored.network)


def test_the_dtype_of_the_computation_can_be_chosen(tmp_path):
    save_native(pack_network(tiny_network().bfloat16(), "int8"), tmp_path)
    network = load_native(tmp_path, LoadOptions(dtype=torch.float32)).network
    assert network.decoder.layers[0].attention.query.dtype == network.decoder.final_norm.weight.dtype == torch.float32
    for weights in ("int8", "int4"):
        with pytest.raises(ClearheadError, match=rf"already packed; leave out weights='{weights}'"):
            load_native(tmp_path, LoadOptions(weights=weights))


QUERY = "decoder.layers.1.attention.query.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d, t: t.pop(f"{QUERY}.scales"), rf"lacks the tensor {QUERY}\.scales"),
        (lambda d, t: t.update({QUERY: torch.zeros(16, 16)}), "is stored both packed and in full"),
        (lambda d, t: t.update({f"{QUERY}.scales": torch.zeros(16, 1).half()}), "do not fit together"),
        (lambda d, t: t.update({f"{QUERY}.scales": torch.zeros(16, 2)}), "do not fit together"),
        (lambda d, t: t.update({f"{QUERY}.quants": torch.zeros(15, 32).byte()}), "do not fit together"),
        (lambda d, t: t.update({f"{QUERY}.scales": torch.full((16, 2), torch.inf).half()}), "NaN or infinite"),
        (lambda d, t: d["packed_weights"].update({QUERY: 17}), r"has shape \(16, 17\); the config needs \(16, 16\)"),
        (lambda d, t: d["packed_weights"].update({QUERY: 0}), "do not fit together"),
        (lambda d, t: d["packed_weights"].update({QUERY: "16"}), "do not fit together"),
        (lambda d, t: d["packed_weights"].update({"decoder.x.weight": 16}), "which this model does not have"),
        (lambda d, t: d["packed_weights"].pop(QUERY), "lacks the tensor"),
        (lambda d, t: d.update(packed_weights=[]), "packed_weights"),
        (lambda d, t: d.update(compute_dtype="float8"), "unknown dtype"),
    ],
)
def test_packed_weights_that_do_not_fit_are_refused(tmp_path, change, message):
    save_native(pack_network(tiny_network(), "int4"), tmp_path)
    description, tensors = json.loads((tmp_path / DESCRIPTION_FILE).read_text()), load_file(tmp_path / WEIGHTS_FILE)
    change(description, tensors)
    (tmp_path / DESCRIPTION_FILE).write_text(json.dumps(description))
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    with pytest.raises(ClearheadError, match=message):
        load_native(tmp_path)
