"""Every engine says what transformers' `generate` says."""

import gguf
import pytest
import torch
import transformers

from clearhead.api import Model, load
from clearhead.benchmark import ours as ours_room
from clearhead.benchmark.ctranslate2 import CTranslate2
from clearhead.benchmark.huggingface import HuggingFace
from clearhead.benchmark.llamacpp import LlamaCpp
from clearhead.benchmark.measure import num_equal, take_turn
from clearhead.benchmark.ours import Graph, open_ours
from clearhead.benchmark.subject import Subject
from clearhead.checkpoint.gguf_model import load_gguf
from clearhead.errors import ClearheadError
from tests.benchmark.conftest import CAPACITY
from tests.checkpoint.test_gguf_model import write_file
from tests.checkpoint.tiny import tiny_network
from tests.verification.models import toy_model


@pytest.fixture
def gguf_subject(tmp_path, monkeypatch):
    """A .gguf file that llama.cpp takes: its reader wants a merge, and ours the tokens of it."""
    tokens, merges = gguf.GGUFWriter.add_token_list, gguf.GGUFWriter.add_token_merges
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_list", lambda writer, them: tokens(writer, [*them[:-2], "t", "1"]))
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_merges", lambda writer, them: merges(writer, ["t 1"]))
    monkeypatch.setenv("CLEARHEAD_HOME", str(tmp_path / "home"))
    path = write_file(tmp_path / "toy.gguf", "llama")
    return Subject(Model(**vars(load_gguf(path))), path, CAPACITY, tmp_path)


def said(engine, prompt, num_tokens):
    return take_turn(engine, prompt, num_tokens).tokens


def generated(subject, prompt, num_tokens):
    model = transformers.AutoModelForCausalLM.from_pretrained(subject.huggingface_folder(), dtype=torch.float32)
    model.generation_config.eos_token_id = None
    tokens = torch.tensor([prompt])
    found = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=num_tokens, do_sample=False)
    return found[0, len(prompt) :].tolist()


# --- the same tokens


@pytest.mark.parametrize("opens", [open_ours, HuggingFace])
def test_a_toy_in_float32(opens, subject):
    prompt = subject.prompt(12)
    engine = opens(subject, "float32")
    assert engine.remark is None
    expected = generated(subject, prompt, 48)
    assert len(set(expected)) > 3
    assert said(engine, prompt, 48) == expected
    assert said(engine, prompt, 48) == expected  # nothing is kept between two calls
    assert engine.weight_bytes == sum(tensor.numel() for tensor in subject.network.parameters()) * 4


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_ctranslate2(weights, subject, capsys):
    pytest.importorskip("ctranslate2")
    transformers.utils.logging.enable_progress_bar()
    engine, prompt = CTranslate2(subject, weights), subject.prompt(12)
    assert capsys.readouterr().err == ""  # no bars of its converter's
    found = said(engine, prompt, 48)
    assert said(engine, prompt, 48) == found
    if weights == "float32":  # eight bits, of activations too, are too few for a toy to say the same
        assert found == generated(subject, prompt, 48)
    num_weights = sum(tensor.numel() for tensor in subject.network.parameters())
    num_bytes = num_weights * (4 if weights == "float32" else 1)
    assert num_bytes < engine.weight_bytes < 1.2 * num_bytes + 8192  # names and scales beside the weights


@pytest.mark.parametrize(("weights", "num_same"), [("bfloat16", 16), ("int8", 6), ("int4", 0)])
def test_llama_cpp(weights, num_same, gguf_subject):
    """Eight bits are the same blocks; of four, theirs are Q4_0 and ours have an offset: 5 bits a weight, not 4.5."""
    pytest.importorskip("llama_cpp")
    theirs, ours = LlamaCpp(gguf_subject, weights), open_ours(gguf_subject, weights)
    assert num_equal(said(theirs, [3, 4, 5], 20), said(ours, [3, 4, 5], 20)) >= num_same
    assert said(theirs, [3, 4, 5], 20) == said(theirs, [3, 4, 5], 20)
    growth = 5 / 4.5 if weights == "int4" else 1
    assert ours.weight_bytes == pytest.approx(theirs.weight_bytes * growth, rel=0.1)
    (kept,) = (gguf_subject.folder / "home" / "benchmark").iterdir()
    made = kept.stat().st_mtime_ns
    assert LlamaCpp(gguf_subject, weights).weight_bytes == theirs.weight_bytes
    assert kept.stat().st_mtime_ns == made  # not made twice


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_a_file_runs_from_its_own_blocks(kind, gguf_subject):
    write_file(gguf_subject.path, "llama", kind=gguf.GGMLQuantizationType[kind])
    pytest.importorskip("llama_cpp")
    theirs, ours = LlamaCpp(gguf_subject, "stored"), open_ours(gguf_subject, "stored")
    assert num_equal(said(theirs, [3, 4, 5], 20), said(ours, [3, 4, 5], 20)) >= 2  # both round x to eight bits
    assert theirs.weight_bytes == pytest.approx(ours.weight_bytes, rel=0.15)  # ours fills rows up to 64 numbers
    assert not (gguf_subject.folder / "home").exists()


def test_stories15m_says_what_transformers_says(stories15m, tmp_path):
    subject = Subject(load(stories15m, dtype="float32", fast=False), stories15m, 128, tmp_path)
    prompt = subject.prompt(40)
    assert prompt[0] == 1
    assert said(open_ours(subject, "float32"), prompt, 40) == generated(subject, prompt, 40)


# --- ours


def test_fewer_bits_are_fewer_bytes_and_almost_the_same_logits(subject):
    engines = [open_ours(subject, weights) for weights in ("float32", "bfloat16", "int8", "int4")]
    sizes = [engine.weight_bytes for engine in engines]
    assert sizes == sorted(sizes, reverse=True)
    assert [engine.cache_element_bytes for engine in engines] == [4, 2, 2, 2]
    prompt = subject.prompt(8)
    first = [said(engine, prompt, 1) for engine in engines]
    assert first[:3] == [first[0]] * 3


def test_the_subject_stays_as_it_is(subject):
    before = {name: tensor.clone() for name, tensor in subject.network.state_dict().items()}
    for weights in ("int4", "bfloat16"):
        said(open_ours(subject, weights), [1, 2], 3)
    after = subject.network.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_what_the_kernels_do_not_know_runs_in_modules(tmp_path):
    subject = Subject(toy_model("deepseek"), None, CAPACITY, tmp_path)
    engine, prompt = open_ours(subject, "float32"), subject.prompt(9)
    assert engine.remark == "runs in PyTorch's modules: this kind of attention"
    assert said(engine, prompt, 12) == generated(subject, prompt, 12)


def test_without_a_compiler_the_modules_run(subject, monkeypatch):
    def none(network):
        raise ClearheadError("there is no C++ compiler here")

    monkeypatch.setattr(ours_room.stack, "accelerate", none)
    engine, prompt = open_ours(subject, "float32"), subject.prompt(5)
    assert engine.remark == "runs in PyTorch's modules: there is no C++ compiler here"
    assert said(engine, prompt, 6) == generated(subject, prompt, 6)


class EagerDecoder:
    """Stands for the CUDA graph: the network's own steps, its token in a buffer that the next one overwrites."""

    def __init__(self, network, batch, capacity, choose):
        self.network, self.choose, self.token = network, choose, torch.zeros(1, dtype=torch.long)

    @torch.no_grad()
    def read(self, prompts):
        self.text = torch.tensor(prompts)
        return self.network(self.text)[:, -1]

    def start(self, tokens):
        self.token.copy_(tokens)

    def next(self):
        self.text = torch.cat((self.text, self.token[None]), dim=1)
        self.token.copy_(self.choose(self.read(self.text.tolist()), None))
        return self.token


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 20])
def test_the_graph_is_heard_one_token_behind(num_tokens, subject, monkeypatch):
    monkeypatch.setattr(ours_room.cuda, "GraphDecoder", EagerDecoder)
    monkeypatch.setattr(ours_room.cuda, "AsyncTokens", Letter)
    engine, prompt = Graph(subject.network, "float32", CAPACITY), subject.prompt(6)
    assert said(engine, prompt, num_tokens) == generated(subject, prompt, num_tokens)


class Letter:
    """A mailbox without a GPU."""

    def __init__(self, tokens):
        self.tokens = tokens.tolist()

    def read(self):
        return self.tokens


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "int4"])
def test_the_graph_on_a_gpu(weights, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    network = tiny_network(width=64, vocab_size=96).cuda()
    subject = Subject(Model(network), None, CAPACITY, tmp_path)
    engine, prompt = open_ours(subject, weights), subject.prompt(6)
    assert isinstance(engine, Graph)
    assert said(engine, prompt, 20) == said(engine, prompt, 20)
    if weights == "float32":
        assert said(engine, prompt, 20) == generated(subject, prompt, 20)
