"""BART, Marian and Pegasus against transformers."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from clearhead.checkpoint.huggingface import load_folder
from clearhead.errors import ClearheadError
from clearhead.families import bart, preset
from clearhead.families.settings import Settings
from tests.parity.harness import (
    VOCAB,
    Case,
    build,
    check_float64,
    check_logits,
    check_mutants,
    check_round_trip,
    inputs,
    run_reference,
)

SMALL = {
    "vocab_size": VOCAB,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": 1,
    "attn_implementation": "eager",
}
SEPARATE = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 89}
KINDS = {
    "bart": (transformers.BartForConditionalGeneration, transformers.BartConfig),
    "marian": (transformers.MarianMTModel, transformers.MarianConfig),
    "pegasus": (transformers.PegasusForConditionalGeneration, transformers.PegasusConfig),
}
POSITIONS = r"model\.(encoder|decoder)\.embed_positions\.weight"


def model(kind, **changes):
    def make():
        made, config = KINDS[kind]
        found = made(config(**(SMALL | changes)))
        for part in found.modules():  # config.json has no word for it, so every norm has 1e-5
            assert not isinstance(part, torch.nn.LayerNorm) or part.eps == 1e-5
        return found

    return make


def sinusoids_stay(name, tensor):
    """Fixed tables are not drawn; in float64 they get the digits that transformers' own float32 lacks."""
    if "embed_positions" not in name:
        return None
    rows, width = tensor.shape
    angles = np.arange(rows)[:, None] / 10000 ** (2 * np.arange(width // 2) / width)
    exact = torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], axis=1))
    torch.testing.assert_close(tensor.double(), exact, rtol=0, atol=1e-7)
    return exact if tensor.dtype == torch.float64 else tensor


CASES = [
    Case("bart", model("bart")),
    Case("bart-scaled-relu", model("bart", scale_embedding=True, activation_function="relu")),
    Case("marian", model("marian", scale_embedding=True, activation_function="swish"), special=sinusoids_stay),
    Case("marian-unscaled-gelu", model("marian"), special=sinusoids_stay),
    Case("marian-relu", model("marian", scale_embedding=True, activation_function="relu"), special=sinusoids_stay),
    Case("marian-separate-vocabularies", model("marian", **SEPARATE), special=sinusoids_stay),
    Case(
        "pegasus",
        model("pegasus", scale_embedding=True, activation_function="relu"),
        special=sinusoids_stay,
        recomputed=POSITIONS,
    ),
    Case("pegasus-unscaled", model("pegasus"), special=sinusoids_stay, recomputed=POSITIONS),
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
    assert check_mutants(case, tmp_path) >= 60


@pytest.mark.parametrize("name", bart.PRESETS)
def test_presets_survive_their_own_words(name):
    assert bart.read_config(Settings(bart.write_config(preset(name)), "written")) == preset(name)


def test_checkpoint_of_the_bare_model(tmp_path):
    """As bart-large was released: no prefix, no logit bias, every copy of the table and fairseq's version."""
    case = CASES[0]
    model = build(case)
    model.final_logits_bias.zero_()
    model.model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for stack in ("encoder", "decoder"):
        tensors[f"{stack}.embed_tokens.weight"] = tensors["shared.weight"].clone()
        tensors[f"{stack}.version"] = torch.tensor([2.0])
    save_file(tensors, tmp_path / "model.safetensors")
    network = load_folder(tmp_path).network
    assert not network.config.head.bias
    assert bart.read_config(Settings(bart.write_config(network.config), "written")) == network.config
    given = inputs(case, network.config, padded=True)
    with torch.no_grad():
        torch.testing.assert_close(network(**given), run_reference(model, case, given), rtol=0, atol=1e-5)


def test_copy_of_what_is_not_there(tmp_path):
    case = next(case for case in CASES if case.name == "marian-separate-vocabularies")
    build(case).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(89, 48)}, tmp_path / "model.safetensors")
    with pytest.raises(ClearheadError, match=r"holds the tensor lm_head\.weight, which this model has no place for"):
        load_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("bart-base", {"normalize_before": True}),
        ("bart-base", {"add_final_layer_norm": True}),
        ("bart-base", {"static_position_embeddings": True}),
        ("bart-base", {"tie_word_embeddings": False}),
        ("bart-base", {"is_encoder_decoder": False}),
        ("bart-base", {"activation_function": "gelu_10"}),
        ("marian", {"decoder_vocab_size": 100}),
        ("marian", {"normalize_embedding": True}),
        ("pegasus-large", {"normalize_before": False}),
        ("pegasus-large", {"is_decoder": True}),
    ],
    ids=json.dumps,
)
def test_unknown_words_are_refused(name, wrong):
    words = bart.write_config(preset(name)) | wrong
    with pytest.raises(ClearheadError, match=r"config\.json"):
        bart.read_config(Settings(words, "config.json"))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"d_model": 0}, "head_width is 0"),
        ({"decoder_layers": 0}, "a stack needs at least one layer"),
        ({"encoder_layers": 10**8}, "'encoder_layers' is 100000000"),
        ({"encoder_attention_heads": 0}, "cannot be split among 0 heads"),
        ({"encoder_attention_heads": 5}, "cannot be split among 5 heads"),
    ],
    ids=json.dumps,
)
def test_impossible_sizes_are_refused(wrong, sentence):
    with pytest.raises(ClearheadError, match=sentence):
        bart.read_config(Settings(bart.write_config(preset("bart-base")) | wrong, "config.json"))


@pytest.mark.parametrize("name", ["transformer-base", "annotated-transformer", "t5-small", "llama-7b"])
def test_other_families_cannot_be_said(name):
    with pytest.raises(ClearheadError, match=r"cannot say all|this family"):
        bart.write_config(preset(name))
