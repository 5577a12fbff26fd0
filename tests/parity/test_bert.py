"""BERT against transformers: with the head of masked words, as pretrained, and bare as sentence encoders are."""

from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from clearhead.checkpoint.huggingface import load_folder
from clearhead.errors import ClearheadError
from tests.parity.harness import VOCAB, Case, build, check_float64, check_logits, check_mutants, check_round_trip

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 32,
    "layer_norm_eps": 1e-3,
    "attn_implementation": "eager",
}


def bert(kind, *arguments, **changes):
    return lambda: kind(transformers.BertConfig(**(SMALL | changes)), *arguments)


PRETRAINED = Case(
    "pretrained", bert(transformers.BertForPreTraining), output="prediction_logits", recomputed="cls.seq_relationship.*"
)
# We save the names of the whole model, which transformers reads as well.
BARE = Case("bare", bert(transformers.BertModel), output="last_hidden_state", exact_tensors=False)
CASES = [
    Case("masked-words", bert(transformers.BertForMaskedLM)),
    Case("masked-words-tanh-gelu", bert(transformers.BertForMaskedLM, hidden_act="gelu_pytorch_tanh")),
    PRETRAINED,
    BARE,
    replace(BARE, name="bare-without-pooler", build=bert(transformers.BertModel, False)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_equal(case, tmp_path):
    check_logits(case, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_identical_in_float64(case, tmp_path):
    check_float64(case, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_round_trip_through_the_disk(case, tmp_path):
    check_round_trip(case, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_one_field_error_is_seen(case, tmp_path):
    assert check_mutants(case, tmp_path) >= 12


@torch.no_grad()
def test_segments_and_pooler(tmp_path, generator):
    model = build(BARE)
    model.save_pretrained(tmp_path)
    network = load_folder(tmp_path).network
    tokens = torch.randint(0, VOCAB, (2, 24), generator=generator)
    segments = torch.randint(0, 2, (2, 24), generator=generator)
    theirs = model(tokens, token_type_ids=segments)
    hidden = network.hidden_states(tokens, token_types=segments)
    assert (hidden - theirs.last_hidden_state).abs().max() <= 1e-5
    assert (network.pool(hidden) - theirs.pooler_output).abs().max() <= 1e-5
    assert (hidden - network.hidden_states(tokens)).abs().max() > 0.1


# --- what the tensors tell


def test_head_and_pooler_go_by_the_tensors(tmp_path):
    """The released bert-base-uncased names a class without pooler, and holds one."""
    build(PRETRAINED).save_pretrained(tmp_path)
    rewrite_config(tmp_path, '"BertForPreTraining"', '"BertForMaskedLM"')
    config = load_folder(tmp_path).network.config
    assert config.head is not None
    assert config.pooler
    build(BARE).save_pretrained(tmp_path)
    rewrite_config(tmp_path, '"BertModel"', '"BertForMaskedLM"')
    config = load_folder(tmp_path).network.config
    assert config.head is None
    assert config.pooler


def rewrite_config(folder, old, new):
    text = (folder / "config.json").read_text()
    assert old in text
    (folder / "config.json").write_text(text.replace(old, new))


def test_norms_by_their_older_names(tmp_path):
    build(PRETRAINED).save_pretrained(tmp_path)
    expected = load_folder(tmp_path).network.state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    older = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    assert older.keys() != tensors.keys()
    save_file(older, tmp_path / "model.safetensors")
    found = load_folder(tmp_path).network.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    both = older | {"bert.embeddings.LayerNorm.weight": torch.ones(48)}
    save_file(both, tmp_path / "model.safetensors")
    with pytest.raises(ClearheadError, match=r"holds the tensor bert\.embeddings\.LayerNorm\.gamma"):
        load_folder(tmp_path)


@torch.no_grad()
def test_released_sentence_encoder(minilm, generator):
    """all-MiniLM-L6-v2, every hidden state of a padded batch."""
    theirs = transformers.BertModel.from_pretrained(minilm, attn_implementation="eager").eval()
    network = load_folder(minilm).network
    tokens = torch.randint(1000, 30000, (3, 40), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, 25:] = 0
    expected = theirs(tokens, attention_mask=mask)
    hidden = network(tokens, mask)
    assert (hidden - expected.last_hidden_state)[mask.bool()].abs().max() <= 1e-5
    assert (network.pool(hidden) - expected.pooler_output).abs().max() <= 1e-5
