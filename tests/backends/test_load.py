"""Weights in few bits and the fast step as users ask for them: load, generate, save, and what is refused."""

import pytest
import torch

import clearhead
from clearhead.backends.cpu.stack import AcceleratedStack
from clearhead.backends.cpu_kernels import library as cpu
from clearhead.backends.modules import PackedLinear, PackedTable, is_packed
from clearhead.checkpoint.gguf import open_gguf
from clearhead.errors import ClearheadError
from clearhead.model.transformer import Transformer
from tests.backends.cpu.test_stack import logits_of
from tests.book.shrink import shrink
from tests.model.toys import redraw

PROMPT = "The letter was posted in the morning, and"


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A small saved LLaMA."""
    folder = tmp_path_factory.mktemp("toy")
    torch.manual_seed(0)
    network = Transformer(shrink(clearhead.preset("llama-3.1-8b")))
    redraw(network)
    clearhead.Model(network.eval()).save(folder / "model")
    return folder / "model"


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_packing_at_the_door(toy, weights):
    full, packed = clearhead.load(toy, fast=False), clearhead.load(toy, weights=weights, fast=False)
    assert isinstance(packed.network.decoder.layers[0].attention.query, PackedLinear)
    assert isinstance(packed.network.decoder.embedding.tokens, PackedTable)
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        expected, found = full.network(tokens), packed.network(tokens).float()
    assert (found - expected).norm() / expected.norm() < (0.02 if weights == "int8" else 0.3)
    assert len(packed.generate([1, 2, 3], max_new_tokens=4).tokens) == 4


def test_packed_weights_are_not_saved(toy, tmp_path):
    with pytest.raises(ClearheadError, match="packed weights are not saved"):
        clearhead.load(toy, weights="int8").save(tmp_path / "other")


def test_a_fast_model_can_still_be_saved_and_read(toy, tmp_path):
    model = clearhead.load(toy, fast=True)
    before = model.generate([1, 2, 3], max_new_tokens=6).tokens
    assert isinstance(model.network.decoder, AcceleratedStack)
    model.save(tmp_path / "again")
    again = clearhead.load(tmp_path / "again", fast=False)
    for (name, ours), (_, theirs) in zip(
        again.network.named_parameters(), clearhead.load(toy, fast=False).network.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert again.generate([1, 2, 3], max_new_tokens=6).tokens == before


def test_unasked_nothing_is_compiled(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "_loaded", None)
    monkeypatch.setattr(cpu, "library_path", lambda: tmp_path / "missing.so")
    monkeypatch.setattr(cpu, "compile_library", lambda path: pytest.fail("nobody asked for a compiler"))
    model = clearhead.load(toy, weights="int4")
    assert not isinstance(model.network.decoder, AcceleratedStack)
    assert len(model.generate([1, 2], max_new_tokens=2).tokens) == 2


def test_the_artefact_is_built_once_and_found_again(tmp_path, monkeypatch):
    path = tmp_path / "kernels" / "built.so"
    monkeypatch.setattr(cpu, "library_path", lambda: path)
    monkeypatch.setattr(cpu, "_loaded", None)
    try:
        assert cpu.load_kernel_library(build=True) is not None
    except ClearheadError as error:
        pytest.skip(str(error))
    written = path.stat().st_mtime_ns
    monkeypatch.setattr(cpu, "_loaded", None)
    assert cpu.load_kernel_library() is not None
    assert path.stat().st_mtime_ns == written
    assert list(path.parent.iterdir()) == [path]


def test_without_a_compiler_the_sentence_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ClearheadError, match="need a C\\+\\+ compiler"):
        cpu.compile_library(tmp_path / "kernels.so")


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ClearheadError, match="cannot compile the CPU kernels"):
        cpu.compile_library(tmp_path / "kernels.so")
    assert not list(tmp_path.glob("*.so"))


def test_a_compiler_may_have_arguments_and_may_be_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "false -x")
    with pytest.raises(ClearheadError, match="false cannot compile"):
        cpu.compile_library(tmp_path / "kernels.so")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ClearheadError, match=r"the CPU kernels cannot be compiled: .*no-such-compiler"):
        cpu.compile_library(tmp_path / "kernels.so")


def test_a_library_of_another_system_is_as_none(toy, tmp_path, monkeypatch):
    (tmp_path / "other.so").write_bytes(b"of another system")
    monkeypatch.setattr(cpu, "_loaded", None)
    monkeypatch.setattr(cpu, "library_path", lambda: tmp_path / "other.so")
    assert not isinstance(clearhead.load(toy).network.decoder, AcceleratedStack)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [({"weights": "int3"}, "unknown weights 'int3'"), ({"weights": "stored"}, "only a .gguf file")],
)
def test_what_cannot_be_had_is_said(toy, asked, sentence):
    with pytest.raises(ClearheadError, match=sentence):
        clearhead.load(toy, **asked)


def test_an_unknown_architecture_says_what_is_unknown(tmp_path):
    torch.manual_seed(0)
    clearhead.Model(Transformer(shrink(clearhead.preset("deepseek-v3"))).eval()).save(tmp_path / "m")
    with pytest.raises(ClearheadError, match="latent attention is not supported"):
        clearhead.load(tmp_path / "m", fast=True)
    assert clearhead.load(tmp_path / "m").generate([1, 2], max_new_tokens=2).tokens


def test_products_of_packed_weights_run_in_kernels_whatever_the_architecture(tmp_path):
    clearhead.create(shrink(clearhead.preset("deepseek-v3"))).save(tmp_path / "m")
    model = clearhead.load(tmp_path / "m", weights="int4", fast=True)
    assert not isinstance(model.network.decoder, AcceleratedStack)
    assert model.generate([1, 2], max_new_tokens=2).tokens


def test_smollm2_from_its_own_blocks(smollm2_gguf):
    """The blocks say what the numbers say; the kernels only round what they are multiplied by."""
    full = clearhead.load(smollm2_gguf, fast=False)
    stored = clearhead.load(smollm2_gguf, dtype="float32", weights="stored", fast=False)
    assert is_packed(stored.network)
    kept = open_gguf(smollm2_gguf).tensors["blk.3.attn_q.weight"]
    assert stored.network.decoder.layers[3].attention.query.quants.shape[0] == kept.shape[0]
    for layer in (0, 29):
        ours = stored.network.decoder.layers[layer].attention.query.weight
        torch.testing.assert_close(
            ours, full.network.decoder.layers[layer].attention.query.weight, atol=2e-6, rtol=1e-5
        )
    tokens = torch.tensor([full.encode(PROMPT)])
    numbers = sum(parameter.numel() * 4 for parameter in full.network.parameters())
    kept = sum(part.numel() * part.element_size() for part in (*stored.network.parameters(), *stored.network.buffers()))
    assert kept < numbers / 5
    with torch.no_grad():
        expected = full.network(tokens)
        accelerated = clearhead.load(smollm2_gguf, dtype="float32", weights="stored", fast=True)
        found = accelerated.network(tokens)
    assert (found - expected).norm() / expected.norm() < 0.04  # x is rounded to eight bits
    whole = torch.tensor([[*full.encode(PROMPT), *full.generate(PROMPT, max_new_tokens=16).tokens]])
    steps, expected = (logits_of(model.network, whole, prompt=tokens.shape[1])[0] for model in (accelerated, full))
    errors = (steps - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.mean() < 0.05  # that of one token is chance: 0.01 to 0.12, by how its x happen to round
