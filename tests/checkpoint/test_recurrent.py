"""Recurrent translators in native folders: loading, generating, and errors for invalid folders."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import clearhead
from clearhead.api import RecurrentBaseline
from clearhead.checkpoint.formats import read_config
from clearhead.checkpoint.native import save_native
from clearhead.errors import ClearheadError
from clearhead.model.recurrent import RecurrentConfig, RecurrentTranslator
from clearhead.tokenization.train import train_tokenizer
from clearhead.training.setup import PAIR_SPECIAL_TOKENS

CELLS = ("tanh", "gru", "lstm")


def network_of(cell="gru", **options):
    torch.manual_seed(0)
    sizes = {"source_vocab_size": 11, "target_vocab_size": 11, "embedding_width": 6, "width": 8, "context": 16}
    return RecurrentTranslator(RecurrentConfig(cell=cell, attention="dot_product", **sizes | options)).eval()


@pytest.fixture
def folder(tmp_path):
    special_ids = {"decoder_start_token_id": 1, "eos_token_id": 2}
    save_native(network_of(), tmp_path / "model", special_ids=special_ids)
    return tmp_path / "model"


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_a_loaded_network_computes_the_same_logits(tmp_path, cell, options):
    network = network_of(cell, **options)
    save_native(network, tmp_path)
    loaded = clearhead.load(tmp_path)
    assert isinstance(loaded, RecurrentBaseline)
    assert loaded.network.config == network.config
    source, target = torch.tensor([[3, 4, 5]]), torch.tensor([[1, 6]])
    assert torch.equal(loaded.network(source, target), network(source, target))


def test_a_path_may_start_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    RecurrentBaseline(network_of(), None, None, {}).save("~/model")
    assert (tmp_path / "model").is_dir()
    assert isinstance(clearhead.load("~/model"), RecurrentBaseline)


def test_generated_tokens_are_the_most_likely_under_teacher_forcing(folder):
    """Each token is the most likely one after the tokens before it, and does not depend on the batch."""
    model = clearhead.load(folder)
    sources = [[3, 4, 5], [6, 7, 8, 9, 10]]
    for source, generation in zip(sources, model.generate_many(sources, max_new_tokens=6), strict=True):
        tokens = generation.tokens
        logits = model.network(torch.tensor([source]), torch.tensor([[1, *tokens[:-1]]]))
        assert logits.argmax(dim=-1)[0].tolist() == tokens
        assert generation.finish_reason == ("stop" if tokens[-1] == 2 else "length")
        assert tokens == model.generate(source, max_new_tokens=6).tokens


def test_generation_ends_at_the_stop_token(folder):
    model = clearhead.load(folder)
    with torch.no_grad():
        model.network.head.bias[2] = 100.0
    assert model.generate([3, 4]).tokens == [2]


def test_generate_encodes_and_decodes_text(tmp_path):
    tokenizer = train_tokenizer(["abcdef"], "character", special_tokens=PAIR_SPECIAL_TOKENS)
    size = tokenizer.vocab_size
    special_ids = {"decoder_start_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    network = network_of(source_vocab_size=size, target_vocab_size=size)
    RecurrentBaseline(network, tokenizer, None, special_ids).save(tmp_path / "model")
    generation = clearhead.load(tmp_path / "model").generate("abc", max_new_tokens=5)
    without_end = [token for token in generation.tokens if token != tokenizer.eos_id]
    assert generation.text == tokenizer.decode(without_end)
    assert generation.prompt_tokens == tokenizer.encode("abc")


def test_operations_that_need_a_transformer_are_rejected(folder):
    model = clearhead.load(folder)
    for operation in (
        lambda: model.config,
        lambda: model.stream([3]),
        lambda: model.embed([[3]]),
        lambda: model.score([3]),
    ):
        with pytest.raises(ClearheadError, match="recurrent network"):
            operation()
    for options in ({"beams": 2}, {"temperature": 0.5}, {"n": 2}, {"top_k": 3}):
        with pytest.raises(ClearheadError, match="takes the most likely token"):
            model.generate_many([[3]], **options)
    with pytest.raises(ClearheadError, match="save it with format 'native'"):
        model.save(folder, "huggingface")
    for options in ({"fast": True}, {"weights": "int8"}):
        with pytest.raises(ClearheadError, match="recurrent network"):
            clearhead.load(folder, **options)
    with pytest.raises(ClearheadError, match="a Transformer is needed"):
        read_config(folder)


def test_invalid_prompts_are_rejected(folder):
    model = clearhead.load(folder)
    assert model.generate_many([]) == []
    assert model.generate_many([[3]], max_new_tokens=0)[0].tokens == []
    for call, message in (
        (lambda: model.generate_many([[3], []]), "empty"),
        (lambda: model.generate_many("abc"), "give a list of prompts"),
        (lambda: model.generate_many([[3]], max_new_tokens=-3), "max_new_tokens is -3"),
        (lambda: model.generate_many([[3]], max_new_tokens="5"), "max_new_tokens is '5'"),
    ):
        with pytest.raises(ClearheadError, match=message):
            call()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors: tensors.pop("head.bias"), "lacks the tensor head.bias"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "holds the tensor extra, which"),
        (
            lambda tensors: tensors.update({"head.bias": torch.zeros(12)}),
            r"has shape \(12,\); the config needs \(11,\)",
        ),
        (lambda tensors: tensors["head.bias"].fill_(torch.nan), "holds NaN"),
    ],
)
def test_the_error_names_damaged_weights(folder, damage, message):
    tensors = load_file(folder / "weights.safetensors")
    damage(tensors)
    save_file(tensors, folder / "weights.safetensors")
    with pytest.raises(ClearheadError, match=message):
        clearhead.load(folder)


def test_an_unknown_kind_of_network_is_rejected(folder):
    description = json.loads((folder / "clearhead.json").read_text())
    (folder / "clearhead.json").write_text(json.dumps(description | {"kind": "recurrent_translater"}))
    with pytest.raises(ClearheadError, match="recurrent_translator"):
        clearhead.load(folder)


def test_weights_are_converted_to_the_chosen_dtype(folder):
    assert clearhead.load(folder, dtype="bfloat16").network.head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("size", [10**9 + 1, 2**62, 2**63 - 1, 2**64])
@pytest.mark.parametrize("name", ["source_vocab_size", "target_vocab_size", "embedding_width", "width", "context"])
def test_a_size_that_no_network_has_is_rejected(folder, name, size):
    path = folder / "clearhead.json"
    description = json.loads(path.read_text())
    description["model"][name] = size
    path.write_text(json.dumps(description))
    with pytest.raises(ClearheadError, match=f"{name} is .*; it must"):
        clearhead.load(folder)


def test_the_largest_sizes_together_are_rejected_with_one_sentence(folder):
    path = folder / "clearhead.json"
    description = json.loads(path.read_text())
    sizes = ("source_vocab_size", "target_vocab_size", "embedding_width", "width")
    description["model"] |= dict.fromkeys(sizes, 10**9)
    path.write_text(json.dumps(description))
    with pytest.raises(ClearheadError, match="a model of these sizes cannot be created"):
        clearhead.load(folder)
