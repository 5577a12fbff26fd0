"""Test that every engine generates the tokens of transformers' `generate`."""

import gguf
import pytest
import torch
import transformers

from clearhead.api import Model, load
from clearhead.architecture import DynamicScaling, Rope
from clearhead.benchmark import BenchmarkTarget, clearhead_engine
from clearhead.benchmark.clearhead_engine import CudaGraphEngine, open_clearhead
from clearhead.benchmark.ctranslate2 import CTranslate2Engine
from clearhead.benchmark.huggingface import HuggingFaceEngine
from clearhead.benchmark.llamacpp import LlamaCppEngine
from clearhead.benchmark.measurement import count_equal, run_engine
from clearhead.checkpoint.gguf_model import load_gguf
from clearhead.errors import ClearheadError
from clearhead.model import Transformer
from tests.backends.networks import with_attention
from tests.benchmark.conftest import CAPACITY
from tests.checkpoint.test_gguf_model import write_file
from tests.checkpoint.tiny import tiny_network
from tests.model.toys import redraw
from tests.verification.models import toy_model


@pytest.fixture
def gguf_target(tmp_path, monkeypatch):
    """Return a .gguf file that llama.cpp accepts: its reader needs a merge, and ours the tokens of the merge."""
    tokens, merges = gguf.GGUFWriter.add_token_list, gguf.GGUFWriter.add_token_merges
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_token_list", lambda writer, texts: tokens(writer, [*texts[:-2], "t", "1"])
    )
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_merges", lambda writer, texts: merges(writer, ["t 1"]))
    monkeypatch.setenv("CLEARHEAD_HOME", str(tmp_path / "home"))
    path = write_file(tmp_path / "toy.gguf", "llama")
    return BenchmarkTarget(Model(**vars(load_gguf(path))), path, CAPACITY, tmp_path)


def generate(engine, prompt, num_tokens):
    return run_engine(engine, prompt, num_tokens).tokens


def reference_tokens(target, prompt, num_tokens):
    """Return the tokens that transformers generates."""
    model = transformers.AutoModelForCausalLM.from_pretrained(target.huggingface_folder(), dtype=torch.float32)
    model.generation_config.eos_token_id = None
    tokens = torch.tensor([prompt])
    output = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=num_tokens, do_sample=False)
    return output[0, len(prompt) :].tolist()


# --- equal tokens


@pytest.mark.parametrize("open_engine", [open_clearhead, HuggingFaceEngine])
def test_float32_tokens_equal_those_of_transformers(open_engine, target):
    prompt = target.prompt(12)
    engine = open_engine(target, "float32")
    assert engine.note is None
    expected = reference_tokens(target, prompt, 48)
    assert len(set(expected)) > 3
    assert generate(engine, prompt, 48) == expected
    assert generate(engine, prompt, 48) == expected  # nothing is kept between calls
    assert engine.weight_bytes == sum(tensor.numel() for tensor in target.network.parameters()) * 4


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_ctranslate2_tokens_equal_those_of_transformers(weights, target, capsys):
    pytest.importorskip("ctranslate2")
    transformers.utils.logging.enable_progress_bar()
    engine, prompt = CTranslate2Engine(target, weights), target.prompt(12)
    assert capsys.readouterr().err == ""  # no progress bars of its converter
    tokens = generate(engine, prompt, 48)
    assert generate(engine, prompt, 48) == tokens
    if weights == "float32":  # 8 bits, for activations too, are too few for equal tokens of a toy model
        assert tokens == reference_tokens(target, prompt, 48)
    num_weights = sum(tensor.numel() for tensor in target.network.parameters())
    num_bytes = num_weights * (4 if weights == "float32" else 1)
    assert num_bytes < engine.weight_bytes < 1.2 * num_bytes + 8192  # names and scales besides the weights


@pytest.mark.parametrize(("weights", "num_same"), [("bfloat16", 16), ("int8", 6), ("int4", 0)])
def test_llama_cpp_tokens_are_close_to_ours(weights, num_same, gguf_target):
    """8-bit blocks are equal; 4-bit blocks are Q4_0 there and have an offset here: 5 bits per weight, not 4.5."""
    pytest.importorskip("llama_cpp")
    llama_cpp, ours = LlamaCppEngine(gguf_target, weights), open_clearhead(gguf_target, weights)
    assert count_equal(generate(llama_cpp, [3, 4, 5], 20), generate(ours, [3, 4, 5], 20)) >= num_same
    assert generate(llama_cpp, [3, 4, 5], 20) == generate(llama_cpp, [3, 4, 5], 20)
    growth = 5 / 4.5 if weights == "int4" else 1
    assert ours.weight_bytes == pytest.approx(llama_cpp.weight_bytes * growth, rel=0.1)
    (file,) = (gguf_target.folder / "home" / "benchmark").iterdir()
    created = file.stat().st_mtime_ns
    assert LlamaCppEngine(gguf_target, weights).weight_bytes == llama_cpp.weight_bytes
    assert file.stat().st_mtime_ns == created  # it is not quantized twice


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_stored_weights_run_from_the_blocks_of_the_file(kind, gguf_target):
    write_file(gguf_target.path, "llama", kind=gguf.GGMLQuantizationType[kind])
    pytest.importorskip("llama_cpp")
    llama_cpp, ours = LlamaCppEngine(gguf_target, "stored"), open_clearhead(gguf_target, "stored")
    assert (
        count_equal(generate(llama_cpp, [3, 4, 5], 20), generate(ours, [3, 4, 5], 20)) >= 2
    )  # both round activations to 8 bits
    assert llama_cpp.weight_bytes == pytest.approx(ours.weight_bytes, rel=0.15)  # ours pads rows to multiples of 64
    assert not (gguf_target.folder / "home").exists()


def test_stories15m_tokens_equal_those_of_transformers(stories15m, tmp_path):
    target = BenchmarkTarget(load(stories15m, dtype="float32", fast=False), stories15m, 128, tmp_path)
    prompt = target.prompt(40)
    assert prompt[0] == 1
    assert generate(open_clearhead(target, "float32"), prompt, 40) == reference_tokens(target, prompt, 40)


# --- Clearhead


def test_fewer_bits_read_fewer_bytes_and_give_the_same_first_token(target):
    engines = [open_clearhead(target, weights) for weights in ("float32", "bfloat16", "int8", "int4")]
    sizes = [engine.weight_bytes for engine in engines]
    assert sizes == sorted(sizes, reverse=True)
    assert [engine.cache_element_bytes for engine in engines] == [4, 2, 2, 2]
    prompt = target.prompt(8)
    first = [generate(engine, prompt, 1) for engine in engines]
    assert first[:3] == [first[0]] * 3


def test_engines_do_not_change_the_target(target):
    before = {name: tensor.clone() for name, tensor in target.network.state_dict().items()}
    for weights in ("int4", "bfloat16"):
        generate(open_clearhead(target, weights), [1, 2], 3)
    after = target.network.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_models_that_the_kernels_do_not_support_run_in_pytorch(tmp_path):
    config = toy_model("llama").config
    rope = Rope(scaling=DynamicScaling(factor=2.0, original_context=config.context))
    network = Transformer(with_attention(config, position=rope)).eval()
    redraw(network)
    target = BenchmarkTarget(Model(network), None, CAPACITY, tmp_path)
    engine, prompt = open_clearhead(target, "float32"), target.prompt(9)
    assert engine.note == "runs in PyTorch's modules: DynamicScaling of rotary positions is not supported"
    assert generate(engine, prompt, 12) == reference_tokens(target, prompt, 12)


def test_without_a_compiler_the_model_runs_in_pytorch(target, monkeypatch):
    def raise_error(network):
        raise ClearheadError("there is no C++ compiler here")

    monkeypatch.setattr(clearhead_engine, "accelerate", raise_error)
    engine, prompt = open_clearhead(target, "float32"), target.prompt(5)
    assert engine.note == "runs in PyTorch's modules: there is no C++ compiler here"
    assert generate(engine, prompt, 6) == reference_tokens(target, prompt, 6)


class EagerDecoder:
    """Replaces GraphDecoder: steps of the network itself, with the token in a buffer that the next step overwrites."""

    def __init__(self, network, batch, capacity, choose):
        self.network, self.choose, self.token = network, choose, torch.zeros(1, dtype=torch.long)

    @torch.no_grad()
    def prefill(self, prompts):
        self.text = torch.tensor(prompts)
        return self.network(self.text)[:, -1]

    def start(self, tokens):
        self.token.copy_(tokens)

    def replay_step(self):
        self.text = torch.cat((self.text, self.token[None]), dim=1)
        self.token.copy_(self.choose(self.prefill(self.text.tolist()), None))
        return self.token


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 20])
def test_the_cuda_graph_engine_reports_every_token(num_tokens, target, monkeypatch):
    monkeypatch.setattr(clearhead_engine, "GraphDecoder", EagerDecoder)
    monkeypatch.setattr(clearhead_engine, "AsyncTokens", SyncTokens)
    engine, prompt = CudaGraphEngine(target.network, "float32", CAPACITY), target.prompt(6)
    assert generate(engine, prompt, num_tokens) == reference_tokens(target, prompt, num_tokens)


class SyncTokens:
    """Replaces AsyncTokens without a GPU."""

    def __init__(self, tokens):
        self.tokens = tokens.tolist()

    def result(self):
        return self.tokens


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "int4"])
def test_the_cuda_graph_engine_on_a_gpu(weights, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    network = tiny_network(width=64, vocab_size=96).cuda()
    target = BenchmarkTarget(Model(network), None, CAPACITY, tmp_path)
    engine, prompt = open_clearhead(target, weights), target.prompt(6)
    assert isinstance(engine, CudaGraphEngine)
    assert generate(engine, prompt, 20) == generate(engine, prompt, 20)
    if weights == "float32":
        assert generate(engine, prompt, 20) == reference_tokens(target, prompt, 20)
