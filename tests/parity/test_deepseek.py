"""DeepSeek-V2 and V3 compared with transformers, with latent attention unfolded and absorbed."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from clearhead.checkpoint.huggingface import load_folder
from clearhead.checkpoint.interface import LoadOptions
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
    "num_key_value_heads": 4,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 16,
    "v_head_dim": 14,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    "attn_implementation": "eager",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
    "beta_fast": 8.0,
}
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 4.0}


def v2(**changes):
    return lambda: transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**(SMALL | changes)))


def v3(**changes):
    groups = {"n_group": 4, "topk_group": 2}
    return lambda: transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**(SMALL | groups | changes)))


CASES = [
    Case(
        "v2-groups-yarn",
        v2(**GROUPS, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
        length=90,
        tolerance=1.5e-5,
    ),
    Case("v2-lite-greedy", v2(q_lora_rank=None), tolerance=1.5e-5),
    Case("v3", v3()),
    Case("v3-yarn", v3(rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.5}), length=90),
    Case("v3-halves-no-query-rank", v3(rope_interleave=False, q_lora_rank=None, norm_topk_prob=False)),
    Case("v3-one-group-all-sparse", v3(n_group=1, topk_group=1, first_k_dense_replace=0)),
]


@pytest.mark.parametrize("absorb", [False, True], ids=["unfolded", "absorbed"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_agree(case, absorb, tmp_path):
    check_logits(case, tmp_path, absorb=absorb)


@pytest.mark.parametrize("absorb", [False, True], ids=["unfolded", "absorbed"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_agree_in_float64(case, absorb, tmp_path):
    check_float64(case, tmp_path, absorb=absorb)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_checkpoint_round_trip(case, tmp_path):
    check_round_trip(case, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_error_in_one_field_is_detected(case, tmp_path):
    assert check_mutants(case, tmp_path) >= 20


def test_only_the_multi_token_prediction_layer_is_ignored(tmp_path):
    """V3's checkpoints contain a layer after the last, number 61, that predicts the token after the next."""
    build_reference(CASES[2]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.3.enorm.weight": torch.ones(48)}, file)
    assert len(load_folder(tmp_path).network.config.decoder.layers) == 3
    save_file(tensors | {"model.layers.4.enorm.weight": torch.ones(48)}, file)
    with pytest.raises(ClearheadError, match=r"model\.layers\.4\.enorm\.weight"):
        load_folder(tmp_path)


def test_the_selection_bias_keeps_its_stored_precision(tmp_path):
    build_reference(CASES[2]).save_pretrained(tmp_path)
    network = load_folder(tmp_path, LoadOptions(dtype=torch.bfloat16)).network
    biases = dict(network.named_buffers())
    assert biases
    assert {bias.dtype for bias in biases.values()} == {torch.float32}
    assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}
