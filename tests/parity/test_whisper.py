"""Whisper compared with transformers: encoder output, logits, cached steps, saved tensors, damaged folders."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from clearhead.architecture import AudioEmbedding
from clearhead.backends import accelerate, unsupported_reason
from clearhead.cache import KeyValueCache, forward_step
from clearhead.checkpoint.huggingface import load_folder
from clearhead.errors import ClearheadError
from clearhead.families import preset
from tests.parity.harness import (
    VOCAB,
    Case,
    build_reference,
    check_float64,
    check_logits,
    check_mutants,
    check_round_trip,
    load_network,
    make_inputs,
    run_reference,
)

SIZES = {
    "vocab_size": VOCAB,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 72,
    "num_mel_bins": 10,
    "max_source_positions": 30,
    "max_target_positions": 64,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
    "begin_suppress_tokens": None,
    "attn_implementation": "eager",
}


def whisper_model(**changes):
    return lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**SIZES | changes))


def draw_convolution(name, tensor):
    """Draw the convolutions with an effect of order one: their inputs are bands times three frames."""
    if ".conv" in name and tensor.ndim == 3:
        return torch.randn_like(tensor) * tensor[0].numel() ** -0.5
    return None


# LayerNorm's epsilon, which is not in config.json, changes logits by less than the tolerance
CASES = [
    Case("whisper", whisper_model(), draw=draw_convolution, undetectable=("epsilon",)),
    Case("whisper-relu", whisper_model(activation_function="relu"), draw=draw_convolution, undetectable=("epsilon",)),
    Case("whisper-untied", whisper_model(tie_word_embeddings=False), draw=draw_convolution, undetectable=("epsilon",)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_agree(case, tmp_path):
    check_logits(case, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_agree_in_float64(case, tmp_path):
    check_float64(case, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_round_trip_keeps_everything(case, tmp_path):
    check_round_trip(case, tmp_path)


@pytest.mark.parametrize("case", CASES[:1], ids=str)
def test_errors_in_the_config_are_detected(case, tmp_path):
    assert check_mutants(case, tmp_path) > 50


def test_encoder_output_agrees(tmp_path):
    model = build_reference(CASES[0])
    network = load_network(model, tmp_path)
    features = make_inputs(CASES[0], network.config, padded=False)["source"]
    with torch.no_grad():
        theirs = model.model.encoder(features).last_hidden_state
        assert (network.encode(features).states - theirs).abs().max() <= 1e-5


def test_cached_steps_equal_one_pass(tmp_path):
    """Decode token by token with precomputed cross-attention, in the modules and in the CPU kernels."""
    model = build_reference(CASES[0])
    network = load_network(model, tmp_path)
    inputs = make_inputs(CASES[0], network.config, padded=False)
    theirs = run_reference(model, CASES[0], inputs)
    for accelerated in (False, True):
        if accelerated and not accelerate(network):
            pytest.skip("no C++ compiler")
        with torch.no_grad():
            encoder_output = network.precompute_cross_attention(network.encode(inputs["source"]))
            cache = KeyValueCache(network.config)
            steps = [
                forward_step(network, token[:, None], cache, encoder_output=encoder_output)
                for token in inputs["target"].unbind(1)
            ]
        assert (torch.stack(steps, dim=1) - theirs).abs().max() <= 1e-5


def test_the_stored_positions_are_those_of_the_checkpoint(tmp_path):
    """A table of other numbers than sinusoids is kept: released files hold it in half precision."""
    network = load_network(build_reference(CASES[0]), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")["model.encoder.embed_positions.weight"]
    assert torch.equal(network.encoder.embedding.positions, stored)


def test_a_new_network_has_the_sinusoids_of_transformers():
    config = transformers.WhisperConfig(**SIZES)
    theirs = transformers.WhisperForConditionalGeneration(config).model.encoder.embed_positions.weight
    embedding = AudioEmbedding(num_mel_bands=10, num_positions=30)
    from clearhead.model import AudioEmbeddingLayer

    ours = AudioEmbeddingLayer(embedding, width=48, dropout=0.0).positions
    assert (ours - theirs).abs().max() <= 2e-6  # transformers computes the angles in float32


@pytest.mark.parametrize("shape", [(1, 10, 59), (1, 9, 60), (10, 60), (0, 10, 60)])
def test_features_of_another_shape_are_refused(shape, tmp_path):
    network = load_network(build_reference(CASES[0]), tmp_path)
    with pytest.raises(ClearheadError, match="audio features have shape"):
        network.encode(torch.zeros(shape))
    with pytest.raises(ClearheadError, match="has no source_mask"):
        network.encode(torch.zeros(1, 10, 60), torch.ones(1, 60))
    with pytest.raises(ClearheadError, match="floating-point"):
        network.encode(torch.zeros(1, 10, 60, dtype=torch.int64))


@pytest.mark.parametrize("name", ["model.encoder.conv2.weight", "model.encoder.embed_positions.weight"])
def test_a_missing_tensor_is_named(name, tmp_path):
    build_reference(CASES[0]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ClearheadError, match=name):
        load_folder(tmp_path)


@pytest.mark.parametrize(("field", "value"), [("scale_embedding", True), ("use_weighted_layer_sum", True)])
def test_unsupported_settings_are_refused(field, value, tmp_path):
    build_reference(CASES[0]).save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(data | {field: value}))
    with pytest.raises(ClearheadError, match=field):
        load_folder(tmp_path)


def test_the_cpu_kernels_decode_and_the_gpu_kernels_do_not():
    config = preset("whisper-tiny")
    assert unsupported_reason(config, "cpu") is None
    assert unsupported_reason(config, "paged") == "an encoder that reads audio is not supported"
