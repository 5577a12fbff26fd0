"""BART, Marian and Pegasus compared with transformers."""

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
    build_reference,
    check_float64,
    check_logits,
    check_mutants,
    check_round_trip,
    make_inputs,
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
CLASSES = {
    "bart": (transformers.BartForConditionalGeneration, transformers.BartConfig),
    "marian": (transformers.MarianMTModel, transformers.MarianConfig),
    "pegasus": (transformers.PegasusForConditionalGeneration, transformers.PegasusConfig),
}
POSITIONS = r"model\.(encoder|decoder)\.embed_positions\.weight"


def reference(model_type, **changes):
    """Return a function that builds the reference, for a Case."""

    def build():
        model_class, config_class = CLASSES[model_type]
        model = model_class(config_class(**(SMALL | changes)))
        for part in model.modules():  # config.json has no setting for epsilon, so every norm has 1e-5
            assert not isinstance(part, torch.nn.LayerNorm) or part.eps == 1e-5
        return model

    return build


def keep_sinusoids(name, tensor):
    """Keep fixed tables; in float64 give them the digits that transformers' float32 tables lack."""
    if "embed_positions" not in name:
        return None
    rows, width = tensor.shape
    angles = np.arange(rows)[:, None] / 10000 ** (2 * np.arange(width // 2) / width)
    exact = torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], axis=1))
    torch.testing.assert_close(tensor.double(), exact, rtol=0, atol=1e-7)
    return exact if tensor.dtype == torch.float64 else tensor


CASES = [
    Case("bart", reference("bart")),
    Case("bart-scaled-relu", reference("bart", scale_embedding=True, activation_function="relu")),
    Case("marian", reference("marian", scale_embedding=True, activation_function="swish"), draw=keep_sinusoids),
    Case("marian-unscaled-gelu", reference("marian"), draw=keep_sinusoids),
    Case("marian-relu", reference("marian", scale_embedding=True, activation_function="relu"), draw=keep_sinusoids),
    Case("marian-separate-vocabularies", reference("marian", **SEPARATE), draw=keep_sinusoids),
    Case(
        "pegasus",
        reference("pegasus", scale_embedding=True, activation_function="relu"),
        draw=keep_sinusoids,
        not_saved=POSITIONS,
    ),
    Case("pegasus-unscaled", reference("pegasus"), draw=keep_sinusoids, not_saved=POSITIONS),
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
    assert check_mutants(case, tmp_path) >= 60


@pytest.mark.parametrize("name", bart.PRESETS)
def test_a_written_preset_reads_back(name):
    assert bart.read_config(Settings(bart.write_config(preset(name)), "written")) == preset(name)


def test_checkpoint_without_head(tmp_path):
    """Like the released bart-large: no prefix, no logit bias, all copies of the token table and fairseq's version."""
    case = CASES[0]
    model = build_reference(case)
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
    inputs = make_inputs(case, network.config, padded=True)
    with torch.no_grad():
        torch.testing.assert_close(network(**inputs), run_reference(model, case, inputs), rtol=0, atol=1e-5)


def test_a_duplicate_of_a_missing_tensor_is_rejected(tmp_path):
    case = next(case for case in CASES if case.name == "marian-separate-vocabularies")
    build_reference(case).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(89, 48)}, tmp_path / "model.safetensors")
    with pytest.raises(ClearheadError, match=r"holds the tensor lm_head\.weight, which this model does not have"):
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
def test_unsupported_settings_are_rejected(name, wrong):
    data = bart.write_config(preset(name)) | wrong
    with pytest.raises(ClearheadError, match=r"config\.json"):
        bart.read_config(Settings(data, "config.json"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"d_model": 0}, "head_width is 0"),
        ({"decoder_layers": 0}, "a stack needs at least one layer"),
        ({"encoder_layers": 10**8}, "'encoder_layers' is 100000000"),
        ({"encoder_attention_heads": 0}, "cannot be divided among 0 heads"),
        ({"encoder_attention_heads": 5}, "cannot be divided among 5 heads"),
    ],
    ids=json.dumps,
)
def test_impossible_sizes_are_rejected(wrong, message):
    with pytest.raises(ClearheadError, match=message):
        bart.read_config(Settings(bart.write_config(preset("bart-base")) | wrong, "config.json"))


@pytest.mark.parametrize("name", ["transformer-base", "annotated-transformer", "t5-small", "llama-7b"])
def test_configs_of_other_families_cannot_be_written(name):
    with pytest.raises(ClearheadError, match=r"cannot express|is not supported|this family"):
        bart.write_config(preset(name))
