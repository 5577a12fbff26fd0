"""Packed weights and the fast path as users request them: load, generate, save, and which requests are refused."""

import shutil
from unittest.mock import Mock

import pytest
import torch

import clearhead
from clearhead.backends.cpu.stack import AcceleratedStack
from clearhead.backends.cpu_kernels import compiling, library
from clearhead.backends.modules import PackedLinear, PackedTable, is_packed
from clearhead.cache import KeyValueCache
from clearhead.checkpoint.gguf import open_gguf
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.model import Transformer
from tests.backends.networks import logits_of
from tests.model.toys import redraw
from tests.toy_presets import shrink, shrink_sizes

PROMPT = "The letter was posted in the morning, and"


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    """A saved LLaMA at toy size."""
    folder = tmp_path_factory.mktemp("toy") / "model"
    torch.manual_seed(0)
    network = Transformer(shrink_sizes(preset("llama-3.1-8b"))).eval()
    redraw(network)
    clearhead.Model(network).save(folder)
    return folder


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_model_loaded_with_packed_weights_is_close_to_the_full_one(llama_folder, weights):
    full = clearhead.load(llama_folder, fast=False)
    packed = clearhead.load(llama_folder, weights=weights, fast=False)
    assert isinstance(packed.network.decoder.layers[0].attention.query, PackedLinear)
    assert isinstance(packed.network.decoder.embedding.tokens, PackedTable)
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        expected, found = full.network(tokens), packed.network(tokens).float()
    assert (found - expected).norm() / expected.norm() < (0.02 if weights == "int8" else 0.3)
    assert len(packed.generate([1, 2, 3], max_new_tokens=4).tokens) == 4


def test_packed_weights_are_saved_as_native_only(llama_folder, tmp_path):
    """After a generation with kernels, the modules hold views of merged weights."""
    model = clearhead.load(llama_folder, weights="int4", fast=True)
    before = model.generate([1, 2, 3], max_new_tokens=6).tokens
    model.save(tmp_path / "packed")
    again = clearhead.load(tmp_path / "packed", fast=True)
    assert again.generate([1, 2, 3], max_new_tokens=6).tokens == before
    with pytest.raises(ClearheadError, match="packed weights can only be saved as native"):
        model.save(tmp_path / "other", format="huggingface")


def test_an_accelerated_model_can_be_saved_and_loaded(llama_folder, tmp_path):
    model = clearhead.load(llama_folder, fast=True)
    before = model.generate([1, 2, 3], max_new_tokens=6).tokens
    assert isinstance(model.network.decoder, AcceleratedStack)
    model.save(tmp_path / "again")
    again = clearhead.load(tmp_path / "again", fast=False)
    original = clearhead.load(llama_folder, fast=False).network.named_parameters()
    for (name, ours), (_, theirs) in zip(again.network.named_parameters(), original, strict=True):
        assert torch.equal(ours, theirs), name
    assert again.generate([1, 2, 3], max_new_tokens=6).tokens == before


@pytest.fixture
def missing_library(tmp_path, monkeypatch):
    """Let the kernels be missing; return the path where they are searched."""
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(library, "_missing", None)
    monkeypatch.setattr(library, "_builder", None)
    monkeypatch.setattr(library, "library_path", lambda: tmp_path / "kernels.so")
    return tmp_path / "kernels.so"


@pytest.mark.parametrize("fast", [None, False])
def test_loading_compiles_nothing_if_that_is_forbidden(llama_folder, missing_library, monkeypatch, fast):
    monkeypatch.setenv("CLEARHEAD_COMPILE", "0" if fast is None else "1")
    monkeypatch.setattr(library, "start_build", lambda path: pytest.fail("the compiler was called"))
    model = clearhead.load(llama_folder, weights="int4", fast=fast)
    assert not isinstance(model.network.decoder, AcceleratedStack)
    assert len(model.generate([1, 2], max_new_tokens=2).tokens) == 2


@pytest.mark.parametrize("weights", ["full", "int4"])
def test_kernels_that_are_built_after_loading_are_used_by_the_next_text(
    kernels, llama_folder, missing_library, monkeypatch, weights
):
    monkeypatch.delenv("CLEARHEAD_COMPILE", raising=False)
    monkeypatch.setattr(library, "start_build", lambda path: Mock(poll=lambda: 0))
    plain = clearhead.load(llama_folder, weights=weights, fast=False)
    with pytest.warns(UserWarning, match="the CPU kernels are being compiled in the background, once"):
        model = clearhead.load(llama_folder, weights=weights)
    assert "PyTorch" in repr(model)
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(model.network(tokens), plain.network(tokens))
        cache = KeyValueCache(model.config)
        model.network(tokens, cache=cache)
        cache.advance()
        built = compiling.library_path()
        shutil.copy(built, missing_library)
        shutil.copy(f"{built}.sha256", f"{missing_library}.sha256")
        model.network(tokens[:, :1], cache=cache)
        assert cache.last_writer is None  # a sequence that PyTorch began
        cache = KeyValueCache(model.config)
        model.network(tokens[:, :1], cache=cache)
        assert cache.last_writer is not None
    assert "CPU kernels" in repr(model)


def test_a_library_of_another_system_is_not_used(llama_folder, missing_library):
    missing_library.write_bytes(b"not a shared library of this system")
    assert not isinstance(clearhead.load(llama_folder).network.decoder, AcceleratedStack)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"weights": "int3"}, "unknown weights 'int3'"), ({"weights": "stored"}, r"\.gguf file")],
)
def test_unavailable_weights_are_refused(llama_folder, options, message):
    with pytest.raises(ClearheadError, match=message):
        clearhead.load(llama_folder, **options)


def test_requesting_the_fast_path_for_an_unsupported_model_is_refused_with_the_reason(tmp_path):
    torch.manual_seed(0)
    clearhead.Model(clearhead.Transformer(shrink(clearhead.preset("gopher-280b"))).eval()).save(tmp_path / "m")
    with pytest.raises(ClearheadError, match="RelativeSinusoid positions are not supported"):
        clearhead.load(tmp_path / "m", fast=True)
    assert clearhead.load(tmp_path / "m").generate([1, 2], max_new_tokens=2).tokens


def test_packed_products_run_in_the_kernels_for_every_architecture(tmp_path):
    clearhead.create(shrink(clearhead.preset("gopher-280b"))).save(tmp_path / "m")
    model = clearhead.load(tmp_path / "m", weights="int4", fast=True)
    assert not isinstance(model.network.decoder, AcceleratedStack)
    assert model.generate([1, 2], max_new_tokens=2).tokens


def test_smollm2_computes_with_the_blocks_of_its_file(smollm2_gguf):
    """Stored blocks unpack to the full weights; the kernels only round what they multiply with."""
    full = clearhead.load(smollm2_gguf, fast=False)
    stored = clearhead.load(smollm2_gguf, dtype="float32", weights="stored", fast=False)
    assert is_packed(stored.network)
    tensor = open_gguf(smollm2_gguf).tensors["blk.3.attn_q.weight"]
    assert stored.network.decoder.layers[3].attention.query.quants.shape[0] == tensor.shape[0]
    for layer in (0, 29):
        ours, theirs = (model.network.decoder.layers[layer].attention.query.weight for model in (stored, full))
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)
    tokens = torch.tensor([full.encode(PROMPT)])
    full_bytes = sum(parameter.numel() * 4 for parameter in full.network.parameters())
    tensors = (*stored.network.parameters(), *stored.network.buffers())
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) < full_bytes / 5
    with torch.no_grad():
        expected = full.network(tokens)
        accelerated = clearhead.load(smollm2_gguf, dtype="float32", weights="stored", fast=True)
        found = accelerated.network(tokens)
    assert (found - expected).norm() / expected.norm() < 0.04  # x is rounded to eight bits
    text = torch.tensor([[*full.encode(PROMPT), *full.generate(PROMPT, max_new_tokens=16).tokens]])
    steps, expected = (
        logits_of(model.network, text, prompt_length=tokens.shape[1])[0] for model in (accelerated, full)
    )
    errors = (steps - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.mean() < 0.05  # single tokens vary from 0.01 to 0.12, depending on how their x happen to round
