"""The config.json of released models reads as our presets; unsupported settings are rejected.

The values are those of the Hub; settings that do not affect the network are left out.
"""

import random

import pytest

from clearhead.errors import ClearheadError
from clearhead.families import family_for, family_of_type, preset
from clearhead.families.rope import recover_mscale, yarn_score_scale
from clearhead.families.settings import Settings
from tests.parity.mutants import mutants

QWEN3 = {"head_dim": 128, "rms_norm_eps": 1e-06, "rope_theta": 1000000, "max_position_embeddings": 40960}
QWEN3 |= {"vocab_size": 151936, "attention_bias": False, "sliding_window": None, "use_sliding_window": False}
GEMMA3 = {"rope_theta": 1000000, "rope_local_base_freq": 10000, "sliding_window_pattern": 6, "rope_scaling": None}
DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK |= {"max_position_embeddings": 163840, "rope_theta": 10000, "rms_norm_eps": 1e-06, "moe_layer_freq": 1}
LLAMA4 = {"hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128}
LLAMA4 |= {"intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "vocab_size": 202048}
LLAMA4 |= {"rope_theta": 500000.0, "rms_norm_eps": 1e-05, "attention_chunk_size": 8192}
LLAMA4 |= {"attn_scale": 0.1, "floor_scale": 8192}
RELEASED = {
    "whisper-large-v3": {
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "d_model": 1280,
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "decoder_layers": 32,
        "decoder_attention_heads": 20,
        "decoder_ffn_dim": 5120,
        "num_hidden_layers": 32,
        "vocab_size": 51866,
        "num_mel_bins": 128,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "activation_function": "gelu",
        "scale_embedding": False,
        "use_weighted_layer_sum": False,
        "apply_spec_augment": False,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        **QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        **QWEN3,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "max_window_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        **GEMMA3,
        "head_dim": 256,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "sliding_window": 512,
        "vocab_size": 262144,
    },
    "gemma-3-27b": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        **DEEPSEEK,
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "rope_scaling": {**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        "vocab_size": 102400,
    },
    "deepseek-v2": {
        "model_type": "deepseek_v2",
        **DEEPSEEK,
        "first_k_dense_replace": 1,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_group": 8,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 128,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 60,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "rope_scaling": {**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "routed_scaling_factor": 16.0,
        "scoring_func": "softmax",
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "vocab_size": 102400,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        **DEEPSEEK,
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "rope_scaling": {**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "vocab_size": 129280,
    },
    "llama-4-scout": {
        "model_type": "llama4_text",
        **LLAMA4,
        "attn_temperature_tuning": 4,
        "interleave_moe_layer_step": 1,
        "max_position_embeddings": 10485760,
        "moe_layers": list(range(48)),
        "no_rope_layers": [1, 1, 1, 0] * 12,
        "num_local_experts": 16,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "use_qk_norm": True,
    },
    "llama-4-maverick": {
        "model_type": "llama4_text",
        **LLAMA4,
        "interleave_moe_layer_step": 2,
        "max_position_embeddings": 1048576,
        "no_rope_layers": [],
        "num_local_experts": 128,
        "rope_scaling": None,
        "use_qk_norm": False,
    },
}


def read(data):
    return family_of_type(data["model_type"]).read_config(Settings(data, "config.json"))


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config_reads_as_the_preset(name):
    assert read(RELEASED[name]) == preset(name)


@pytest.mark.parametrize("name", RELEASED)
def test_a_written_preset_reads_back(name):
    """family_for returns the family whose config.json expresses the whole config."""
    family = family_of_type(RELEASED[name]["model_type"])
    assert family_for(preset(name)) is family
    assert family.read_config(Settings(family.write_config(preset(name)), "written")) == preset(name)


UNSUPPORTED = [
    ("qwen3-0.6b", {"use_sliding_window": True}, "sliding_window"),
    ("qwen3-0.6b", {"layer_types": ["sliding_attention"] * 28}, "layer type"),
    ("qwen3-0.6b", {"layer_types": ["full_attention"]}, "1 entries for 28 layers"),
    ("qwen3-0.6b", {"num_attention_heads": 0}, "num_attention_heads"),
    ("qwen3-0.6b", {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
    ("qwen3-30b-a3b", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ("qwen3-30b-a3b", {"num_experts_per_tok": 129}, "num_chosen"),
    ("gemma-3-1b", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma-3-1b", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
    ("gemma-3-1b", {"layer_types": ["chunked_attention"] * 26}, "layer type"),
    ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob"),
    ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method"),
    ("deepseek-v2", {"scoring_func": "sigmoid"}, "scoring_func"),
    ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func"),
    ("deepseek-v3", {"topk_method": "greedy"}, "topk_method"),
    ("deepseek-v3", {"attention_bias": True}, "attention_bias"),
    ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("deepseek-v3", {"num_key_value_heads": 8}, "num_key_value_heads"),
    ("deepseek-v3", {"n_shared_experts": 0}, "FeedForward.width"),
    ("llama-4-scout", {"no_rope_layers": [1, 0]}, "2 entries for 48 layers"),
    ("llama-4-scout", {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step"),
    ("llama-4-scout", {"layer_types": [["chunked_attention"]] * 48}, "layer type"),
]


@pytest.mark.parametrize(("name", "changes", "message"), UNSUPPORTED)
def test_unsupported_settings_are_rejected(name, changes, message):
    with pytest.raises(ClearheadError, match=message):
        read(RELEASED[name] | changes)


@pytest.mark.parametrize("name", RELEASED)
def test_a_config_is_written_completely_or_rejected(name):
    """A config one field away from a released model reads back as it was, or raises an error."""
    family = family_of_type(RELEASED[name]["model_type"])
    num_written = num_rejected = 0
    for path, config in mutants(preset(name)):
        try:
            data = family.write_config(config)
        except ClearheadError:
            num_rejected += 1
        else:
            assert family.read_config(Settings(data, path)) == config, path
            num_written += 1
    assert num_written >= 5
    assert num_rejected >= 5


def test_mscale_is_recovered_exactly_from_the_score_scale():
    generator = random.Random(0)
    for _ in range(2000):
        factor, mscale, width = generator.uniform(1.001, 100), generator.uniform(0.01, 3), 2 * generator.randint(2, 256)
        scale = yarn_score_scale(width, factor, mscale)
        assert yarn_score_scale(width, factor, recover_mscale(scale, width, factor)) == scale
