"""Model.embed gives the vectors of the sentence-transformers library: pooling, dense layers, prompts, lengths."""

import importlib.util
import json
import shutil

import pytest
import torch

import clearhead
from clearhead.errors import ClearheadError
from tests.api.sentence_folders import write_bert, write_modules

TEXTS = ["the cat sat on the mat", "a dog ran", "fox", "the kind old owl sat on a mat the cat ran"]
MODES = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len": "pooling_mode_mean_sqrt_len_tokens",
    "weighted_mean": "pooling_mode_weightedmean_tokens",
    "last": "pooling_mode_lasttoken",
}


def pooling(*modes, **others):
    return "Pooling", {"word_embedding_dimension": 32} | {MODES[mode]: mode in modes for mode in MODES} | others


def dense(activation, bias=True):
    generator = torch.Generator().manual_seed(5)
    tensors = {"linear.weight": torch.randn(8, 32, generator=generator)}
    if bias:
        tensors["linear.bias"] = torch.randn(8, generator=generator)
    config = {"in_features": 32, "out_features": 8, "bias": bias, "activation_function": activation}
    return "Dense", config | {"tensors": tensors}


def token_states(model, folder, text):
    """Return the hidden states (T, D) that transformers computes for one text without padding."""
    tokens = clearhead.load(folder, fast=False).encode(text)
    with torch.no_grad():
        return model(torch.tensor([tokens])).last_hidden_state[0]


def pooled(states, mode):
    """The documented formula of each mode, for one text."""
    length = len(states)
    weights = torch.arange(1.0, length + 1)[:, None]
    return {
        "cls": states[0],
        "last": states[-1],
        "max": states.max(dim=0).values,
        "mean": states.sum(dim=0) / length,
        "mean_sqrt_len": states.sum(dim=0) / length**0.5,
        "weighted_mean": (states * weights).sum(dim=0) / weights.sum(),
    }[mode]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    return write_bert(folder), folder


@pytest.fixture
def folder(bert, tmp_path):
    """A fresh copy of the toy model, to which a test adds its modules."""
    return shutil.copytree(bert[1], tmp_path / "model")


@pytest.mark.parametrize("mode", MODES)
def test_each_pooling_mode(bert, folder, mode):
    write_modules(folder, pooling(mode))
    expected = torch.stack([pooled(token_states(bert[0], bert[1], text), mode) for text in TEXTS])
    vectors = clearhead.load(folder).embed(TEXTS)
    assert (vectors - expected).abs().max() <= 1e-5
    mean = clearhead.load(bert[1]).embed(TEXTS)  # what the network alone gives
    assert (vectors - mean).abs().max() > 0.1


def test_several_modes_are_concatenated_in_the_order_of_the_library(bert, folder):
    write_modules(folder, pooling("last", "mean", "cls", "max", "weighted_mean", "mean_sqrt_len"))
    states = token_states(bert[0], bert[1], TEXTS[0])
    order = ("cls", "max", "mean", "mean_sqrt_len", "weighted_mean", "last")
    expected = torch.cat([pooled(states, mode) for mode in order])
    assert (clearhead.load(folder).embed(TEXTS[0])[0] - expected).abs().max() <= 1e-5


def test_a_list_of_modes_gives_their_order(bert, folder, tmp_path):
    modes = ["weightedmean", "mean", "cls"]
    write_modules(folder, ("Pooling", {"embedding_dimension": 32, "pooling_mode": modes, "include_prompt": True}))
    states = token_states(bert[0], bert[1], TEXTS[0])
    expected = torch.cat([pooled(states, mode) for mode in ("weighted_mean", "mean", "cls")])
    model = clearhead.load(folder)
    assert (model.embed(TEXTS[0])[0] - expected).abs().max() <= 1e-5
    assert torch.equal(reload(model, tmp_path / "a", "huggingface").embed(TEXTS), model.embed(TEXTS))
    write_modules(folder, ("Pooling", {"embedding_dimension": 32, "pooling_mode": ["mean", {}]}))
    with pytest.raises(ClearheadError, match="unknown pooling mode"):
        clearhead.load(folder)


def test_truncate_dim_keeps_the_first_numbers_of_each_vector(bert, folder, tmp_path):
    write_modules(folder, pooling("mean"), ("Normalize", {}), prompts={"truncate_dim": 5})
    mean = pooled(token_states(bert[0], bert[1], TEXTS[0]), "mean")
    model = clearhead.load(folder)
    assert (model.embed(TEXTS[0])[0] - (mean / mean.norm())[:5]).abs().max() <= 1e-5
    for format in ("native", "huggingface"):
        assert torch.equal(reload(model, tmp_path / format, format).embed(TEXTS), model.embed(TEXTS))


def test_the_short_spelling_of_the_mode(bert, folder):
    write_modules(folder, ("Pooling", {"word_embedding_dimension": 32, "pooling_mode": "lasttoken"}))
    expected = pooled(token_states(bert[0], bert[1], TEXTS[0]), "last")
    assert (clearhead.load(folder).embed(TEXTS[0])[0] - expected).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("activation", "function"),
    [("torch.nn.modules.activation.Tanh", torch.tanh), ("torch.nn.modules.linear.Identity", lambda x: x)],
)
def test_dense_and_normalize(bert, folder, activation, function):
    layer = dense(activation)
    weight, bias = layer[1]["tensors"].values()
    write_modules(folder, pooling("cls"), layer, ("Normalize", {}))
    states = token_states(bert[0], bert[1], TEXTS[0])
    expected = function(weight @ states[0] + bias)
    vector = clearhead.load(folder).embed(TEXTS[0])[0]
    assert vector.shape == (8,)
    assert (vector - expected / expected.norm()).abs().max() <= 1e-5


def test_layer_norm_and_dropout(bert, folder):
    tensors = {"norm.weight": torch.linspace(0.5, 2, 32), "norm.bias": torch.linspace(-1, 1, 32)}
    norm = ("LayerNorm", {"dimension": 32, "tensors": tensors})
    write_modules(folder, pooling("mean"), ("Dropout", {"dropout": 0.5}), norm)
    mean = pooled(token_states(bert[0], bert[1], TEXTS[0]), "mean")
    expected = torch.nn.functional.layer_norm(mean, (32,), tensors["norm.weight"], tensors["norm.bias"])
    assert (clearhead.load(folder).embed(TEXTS[0])[0] - expected).abs().max() <= 1e-5


def test_long_texts_are_cut_and_keep_their_last_special_token(bert, folder):
    write_modules(folder, pooling("last"), text={"max_seq_length": 6, "do_lower_case": False})
    short = "the kind old owl"  # 4 words and 2 special tokens
    expected = pooled(token_states(bert[0], bert[1], short), "last")
    model = clearhead.load(folder)
    assert (model.embed(short + " sat on a mat")[0] - expected).abs().max() <= 1e-5
    write_modules(folder, pooling("last"), text={"max_seq_length": None})
    many = " ".join(["cat"] * 40)
    expected = pooled(token_states(bert[0], bert[1], " ".join(["cat"] * 22)), "last")  # 24 positions
    assert (clearhead.load(folder).embed(many)[0] - expected).abs().max() <= 1e-5


def test_texts_are_stripped_and_lower_cased(bert, folder):
    write_modules(folder, pooling("mean"), text={"max_seq_length": 20, "do_lower_case": True})
    expected = pooled(token_states(bert[0], bert[1], "the cat"), "mean")
    assert (clearhead.load(folder).embed("  The CAT\n")[0] - expected).abs().max() <= 1e-5


def test_prompts(bert, folder):
    prompts = {"prompts": {"query": "query : ", "document": ""}, "default_prompt_name": "query"}
    write_modules(folder, pooling("mean"), prompts=prompts)
    model = clearhead.load(folder)
    expected = pooled(token_states(bert[0], bert[1], "query : the cat"), "mean")
    bare = pooled(token_states(bert[0], bert[1], "the cat"), "mean")
    assert (model.embed("the cat")[0] - expected).abs().max() <= 1e-5
    assert (model.embed("the cat", prompt_name="query")[0] - expected).abs().max() <= 1e-5
    assert (model.embed("the cat", prompt_name="document")[0] - bare).abs().max() <= 1e-5
    assert (model.embed("the cat", prompt="query : ")[0] - expected).abs().max() <= 1e-5
    with pytest.raises(ClearheadError, match=r"unknown prompt 'title'"):
        model.embed("the cat", prompt_name="title")
    with pytest.raises(ClearheadError, match="exclude each other"):
        model.embed("the cat", prompt_name="query", prompt="query : ")


def test_a_prompt_that_is_left_out_of_the_pooling(bert, folder):
    write_modules(folder, pooling("mean", include_prompt=False), prompts={"prompts": {"query": "query : "}})
    states = token_states(bert[0], bert[1], "query : the cat")
    expected = states[3:].mean(dim=0)  # without [CLS], "query" and ":"
    assert (clearhead.load(folder).embed("the cat", prompt_name="query")[0] - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("format", ["native", "huggingface"])
def test_saving_keeps_the_modules(folder, tmp_path, format):
    layer = dense("torch.nn.modules.activation.Tanh", bias=False)
    prompts = {"prompts": {"query": "query : "}, "default_prompt_name": "query"}
    write_modules(folder, pooling("cls", "mean"), text={"max_seq_length": 7}, prompts=prompts)
    model = clearhead.load(folder)
    assert torch.equal(reload(model, tmp_path / "a", format).embed(TEXTS), model.embed(TEXTS))
    write_modules(folder, pooling("cls"), layer, ("Normalize", {}))
    model = clearhead.load(folder)
    again = reload(model, tmp_path / "a", format)
    assert again.sentence.config == model.sentence.config
    assert torch.equal(again.embed(TEXTS), model.embed(TEXTS))
    vectors = again.to(dtype="float64").embed(TEXTS)
    assert vectors.dtype == torch.float64
    assert (vectors - model.embed(TEXTS)).abs().max() <= 1e-5


def reload(model, folder, format):
    model.save(folder, format=format)
    return clearhead.load(folder)


def test_the_network_in_a_subfolder(bert, tmp_path):
    folder = tmp_path / "old"
    shutil.copytree(bert[1], folder / "0_Transformer")
    write_modules(folder, pooling("cls"))
    entries = json.loads((folder / "modules.json").read_text())
    entries[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "0_Transformer" / "sentence_bert_config.json").write_text('{"max_seq_length": 5}')
    expected = pooled(token_states(bert[0], bert[1], "the cat sat"), "cls")
    assert (clearhead.load(folder).embed("the cat sat on a mat")[0] - expected).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "../other"}, r"the path '\.\./other' must name a subfolder"),
        ({"path": "x" * 5000}, "must name a subfolder"),
        ({"type": 3}, "'type' must be a string"),
    ],
)
def test_damaged_modules_are_rejected(folder, change, message):
    write_modules(folder, pooling("cls"))
    entries = json.loads((folder / "modules.json").read_text())
    entries[1] |= change
    (folder / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(ClearheadError, match=message):
        clearhead.load(folder)


def test_modules_that_do_not_fit_are_rejected(folder):
    write_modules(folder, pooling("cls", "mean"), dense("torch.nn.modules.activation.Tanh"))
    with pytest.raises(ClearheadError, match="a Projection takes vectors of width 32, but those before it have 64"):
        clearhead.load(folder)
    wide = dense("torch.nn.modules.activation.Tanh")
    wide[1]["out_features"] = 10**9  # not even allocated
    write_modules(folder, pooling("cls"), wide)
    with pytest.raises(ClearheadError, match=r"linear\.weight has another shape than its config\.json says"):
        clearhead.load(folder)
    write_modules(folder, pooling("cls"), prompts={"prompts": {"query": "q: "}, "default_prompt_name": "passage"})
    with pytest.raises(ClearheadError, match="unknown default prompt 'passage'"):
        clearhead.load(folder)


def test_modules_without_equivalent_are_refused_by_name_when_they_are_used(folder):
    write_modules(folder, pooling("cls"), ("LSTM", {"hidden_dim": 4}))
    model = clearhead.load(folder)
    with pytest.raises(ClearheadError, match="the module LSTM, which is not supported"):
        model.embed("the cat")
    layer = dense("torch.nn.modules.activation.Hardtanh")
    write_modules(folder, pooling("cls"), layer)
    with pytest.raises(ClearheadError, match="the activation 'Hardtanh' is not supported"):
        clearhead.load(folder)


@pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None, reason="sentence-transformers is not installed"
)
def test_vectors_equal_those_of_the_library(folder):
    from sentence_transformers import SentenceTransformer

    layer = dense("torch.nn.modules.activation.Tanh")
    write_modules(folder, pooling("mean", "max"), text={"max_seq_length": 8})
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, convert_to_tensor=True)
    assert (clearhead.load(folder).embed(TEXTS) - expected).abs().max() <= 1e-5
    write_modules(folder, pooling("weighted_mean"), layer, ("Normalize", {}))
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, convert_to_tensor=True)
    assert (clearhead.load(folder).embed(TEXTS) - expected).abs().max() <= 1e-5
