"""BERT compared with transformers: with a masked-language head, as pretrained, and without head."""

from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from clearhead.checkpoint.huggingface import load_folder
from clearhead.errors import ClearheadError
from tests.parity.harness import (
    VOCAB,
    Case,
    build_reference,
    check_float64,
    check_logits,
    check_mutants,
    check_round_trip,
)

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


def bert(model_class, *arguments, **changes):
    """Return a function that builds the reference, for a Case."""
    return lambda: model_class(transformers.BertConfig(**(SMALL | changes)), *arguments)


# test_encoders.py compares the second head, which is not part of these logits.
PRETRAINED = Case(
    "pretrained",
    bert(transformers.BertForPreTraining),
    output="prediction_logits",
    undetectable=("classifier.reads",),
)
# We save with the prefix of the full model, which transformers also reads.
HEADLESS = Case("headless", bert(transformers.BertModel), output="last_hidden_state", same_tensors=False)
CASES = [
    Case("masked-language", bert(transformers.BertForMaskedLM)),
    Case("masked-language-tanh-gelu", bert(transformers.BertForMaskedLM, hidden_act="gelu_pytorch_tanh")),
    PRETRAINED,
    HEADLESS,
    replace(HEADLESS, name="headless-without-pooler", build=bert(transformers.BertModel, False)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_agree(case, tmp_path):
    check_logits(case, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_agree_in_float64(case, tmp_path):
    check_float64(case, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_checkpoint_round_trip(case, tmp_path):
    check_round_trip(case, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_error_in_one_field_is_detected(case, tmp_path):
    assert check_mutants(case, tmp_path) >= 12


@torch.no_grad()
def test_segments_and_pooler(tmp_path, generator):
    model = build_reference(HEADLESS)
    model.save_pretrained(tmp_path)
    network = load_folder(tmp_path).network
    tokens = torch.randint(0, VOCAB, (2, 24), generator=generator)
    segments = torch.randint(0, 2, (2, 24), generator=generator)
    theirs = model(tokens, token_type_ids=segments)
    hidden = network.hidden_states(tokens, token_types=segments)
    assert (hidden - theirs.last_hidden_state).abs().max() <= 1e-5
    assert (network.pool(hidden) - theirs.pooler_output).abs().max() <= 1e-5
    assert (hidden - network.hidden_states(tokens)).abs().max() > 0.1


# --- what depends on the tensors in the checkpoint


def test_head_and_pooler_follow_the_tensors(tmp_path):
    """config.json of the released bert-base-uncased names a class without pooler, but its checkpoint has one."""
    build_reference(PRETRAINED).save_pretrained(tmp_path)
    rewrite_config(tmp_path, '"BertForPreTraining"', '"BertForMaskedLM"')
    config = load_folder(tmp_path).network.config
    assert config.head is not None
    assert config.pooler
    build_reference(HEADLESS).save_pretrained(tmp_path)
    rewrite_config(tmp_path, '"BertModel"', '"BertForMaskedLM"')
    config = load_folder(tmp_path).network.config
    assert config.head is None
    assert config.pooler


def rewrite_config(folder, old, new):
    text = (folder / "config.json").read_text()
    assert old in text
    (folder / "config.json").write_text(text.replace(old, new))


def test_older_names_of_norms_are_read(tmp_path):
    build_reference(PRETRAINED).save_pretrained(tmp_path)
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
    """Compare every hidden state of a padded batch with all-MiniLM-L6-v2."""
    theirs = transformers.BertModel.from_pretrained(minilm, attn_implementation="eager").eval()
    network = load_folder(minilm).network
    tokens = torch.randint(1000, 30000, (3, 40), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, 25:] = 0
    expected = theirs(tokens, attention_mask=mask)
    hidden = network(tokens, mask)
    assert (hidden - expected.last_hidden_state)[mask.bool()].abs().max() <= 1e-5
    assert (network.pool(hidden) - expected.pooler_output).abs().max() <= 1e-5
