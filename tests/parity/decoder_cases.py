"""The decoder-only model types that are rows of a table, as parity cases: one for each type, and variants.

CASES["mixtral"]       # the case that the default tests run
VARIANTS["mixtral"]    # further settings, for the slow tests
"""

import warnings

import torch
import transformers

from clearhead.families.decoders import ROWS
from tests.parity.harness import VOCAB, Case

SIZES = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
SMALL = SIZES | {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80}
SMALL |= {"max_position_embeddings": 128}
RMS = SMALL | {"num_key_value_heads": 2, "rms_norm_eps": 1e-2}
LAYER = SMALL | {"num_key_value_heads": 2, "layer_norm_eps": 1e-2}
GPT = SIZES | {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_inner": 80, "n_positions": 128, "layer_norm_epsilon": 1e-2}
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
# The ramp begins and ends between the first pairs of entries, so that every setting moves it.
YARN |= {"beta_fast": 2.0, "beta_slow": 0.5, "truncate": False}
# The frequencies decrease so slowly that each setting moves the truncated ends too; for heads of width 32.
YARN_TRUNCATED = YARN | {"rope_theta": 2.0, "beta_fast": 2.3, "beta_slow": 2.0, "truncate": True}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 5}
LONG |= {"short_factor": [1.0, 1.2, 1.4, 1.6], "long_factor": [2.0, 3.0, 4.0, 5.0]}
HUNYUAN = {"rope_type": "dynamic", "factor": 1.0, "alpha": 10.0, "rope_theta": 100.0}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 1.7}
WINDOW = {"sliding_window": 5, "num_hidden_layers": 5}
SHARED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# model type -> settings of the default case, and of each variant
SETTINGS = {
    "gpt_neox": (LAYER | {"rotary_pct": 0.5}, {"use_parallel_residual": False}, {"attention_bias": False}),
    "gptj": (GPT | {"rotary_dim": 8}, {"rotary_dim": 12, "activation_function": "gelu"}),
    "codegen": (GPT | {"rotary_dim": 8},),
    "gpt_bigcode": (GPT, {"multi_query": False, "scale_attn_weights": False}),
    "opt": (
        {key: SMALL[key] for key in SMALL if key != "intermediate_size"} | {"ffn_dim": 80},
        {"do_layer_norm_before": False, "enable_bias": False},
        {"_remove_final_layer_norm": True, "layer_norm_elementwise_affine": False, "tie_word_embeddings": False},
    ),
    "xglm": (
        SIZES | {"d_model": 48, "num_layers": 2, "attention_heads": 4, "ffn_dim": 80, "max_position_embeddings": 128},
        {"scale_embedding": False, "activation_function": "relu"},
    ),
    "falcon": (
        SMALL | {"ffn_hidden_size": 80, "layer_norm_epsilon": 1e-2},
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True},
        {"multi_query": False, "parallel_attn": False, "tie_word_embeddings": False},
    ),
    "phi": (LAYER, {"partial_rotary_factor": 0.34, "hidden_act": "gelu"}, {"qk_layernorm": True}),
    "starcoder2": (
        SMALL | {"norm_epsilon": 1e-2},
        {"use_bias": False, "sliding_window": 5, "tie_word_embeddings": False},
    ),
    "stablelm": (
        LAYER | {"partial_rotary_factor": 0.5},
        {"use_parallel_residual": True, "use_qkv_bias": True, "qk_layernorm": True},
    ),
    "nemotron": (
        SMALL | {"num_key_value_heads": 2, "norm_eps": 1e-2},
        {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
    ),
    "cohere": (
        LAYER | {"logit_scale": 0.4},
        {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "cohere2": (
        LAYER | WINDOW,
        {"attention_bias": True, "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]},
    ),
    "ministral": (
        RMS | {"sliding_window": 5, "head_dim": 16},
        {"layer_types": ["full_attention", "sliding_attention"], "tie_word_embeddings": True},
    ),
    "granite": (RMS | GRANITE, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "seed_oss": (RMS | {"head_dim": 16}, {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    "helium": (RMS | {"head_dim": 12}, {"attention_bias": True, "mlp_bias": True}),
    "arcee": (RMS, {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}),
    "apertus": (RMS | {"rope_parameters": LLAMA3}, {"attention_bias": True, "hidden_act": "relu2"}),
    "ernie4_5": (RMS | {"head_dim": 16}, {"use_bias": True, "tie_word_embeddings": False}),
    "hunyuan_v1_dense": (
        RMS | {"head_dim": 16},
        {"attention_bias": True, "rope_parameters": HUNYUAN},
    ),
    "gemma": (RMS | {"head_dim": 16}, {"hidden_act": "gelu", "attention_bias": True, "tie_word_embeddings": False}),
    "gemma2": (
        RMS
        | WINDOW
        | {"head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0},
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "olmo": (SMALL | {"num_key_value_heads": 2}, {"clip_qkv": 0.5, "attention_bias": True}),
    "olmo2": (RMS, {"attention_bias": True, "num_key_value_heads": 4}),
    "olmo3": (
        RMS | WINDOW,
        {
            "head_dim": 32,
            "rope_parameters": {
                "full_attention": YARN_TRUNCATED,
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "exaone4": (RMS | WINDOW | {"head_dim": 16}, {"sliding_window": None, "layer_types": ["full_attention"] * 5}),
    "phi3": (
        RMS,
        {"rope_parameters": LONG, "original_max_position_embeddings": 5, "partial_rotary_factor": 0.67},
        {"sliding_window": 5},
    ),
    "glm": (RMS | {"head_dim": 16}, {"attention_bias": False, "partial_rotary_factor": 0.25}),
    "glm4": (RMS | {"head_dim": 16}, {"attention_bias": False}),
    "glm4_moe": (
        RMS | SHARED | {"num_experts": 6, "n_routed_experts": 6, "head_dim": 16, "routed_scaling_factor": 1.4},
        {"use_qk_norm": True, "n_group": 3, "topk_group": 2, "norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    "mixtral": (RMS | EXPERTS, {"sliding_window": 5, "num_experts_per_tok": 3}),
    "granitemoe": (RMS | EXPERTS | GRANITE, {"attention_bias": True}),
    "olmoe": (RMS | {"num_experts": 6, "num_experts_per_tok": 2}, {"norm_topk_prob": True, "attention_bias": True}),
    "qwen2_moe": (
        RMS | SHARED | {"shared_expert_intermediate_size": 40},
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "qkv_bias": False,
        },
    ),
    "gpt_oss": (
        RMS | EXPERTS | {"head_dim": 16, "sliding_window": 5, "swiglu_limit": 0.8, "rope_parameters": YARN},
        {"attention_bias": False},
    ),
}
ARCHITECTURES = {row.model_type: row.architecture for row in ROWS}


def build(model_type, **settings):
    """Return a function that builds transformers' model with these settings."""
    architecture = ARCHITECTURES[model_type]

    def build_model():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # GPT-BigCode's module uses torch.jit.script
            model_class = getattr(transformers, architecture)
        config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
        return model_class(config(**settings, attn_implementation="eager"))

    return build_model


def draw_small_norms(name, parameter):
    """Draw the norm weights of Gemma around 0, since they are stored minus 1."""
    return 0.3 * torch.randn_like(parameter) if "norm" in name else None


OPTIONS = {
    "gemma": {"draw": draw_small_norms},
    "gemma2": {"draw": draw_small_norms},
    # The padded text has as many tokens as the original context of LongRoPE, the other one more.
    "phi3-1": {"length": 6, "rows_alone": True},
}


def make_case(model_type, number, **settings):
    name = model_type if number == 0 else f"{model_type}-{number}"
    options = OPTIONS.get(model_type, {}) | OPTIONS.get(name, {})
    return Case(name, build(model_type, **settings), **options)


CASES = {name: make_case(name, 0, **first) for name, (first, *_) in SETTINGS.items()}
VARIANTS = {
    name: [make_case(name, number, **first | change) for number, change in enumerate(changes, 1)]
    for name, (first, *changes) in SETTINGS.items()
}
