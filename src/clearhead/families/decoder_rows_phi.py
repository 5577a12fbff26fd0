"""Decoders with LayerNorm and LLaMA's names, as rows of the decoder table.

Phi-1 to Phi-2, StarCoder 2, StableLM, Nemotron, Cohere and Cohere 2 (Command-R).

Sources: Li et al. 2023 (Phi-1.5); Lozhkov et al. 2024; Bellagente et al. 2024; Parmar et al. 2024; Cohere's model cards
(2024); transformers' classes, and the config.json of the releases that the presets name.
"""

from typing import Any

from clearhead.architecture import LayerNorm
from clearhead.families.decoder_row import (
    FULL,
    WINDOWED,
    DecoderRow,
    NormedHeads,
    Rotary,
    Setting,
    Windows,
    choice,
    gelu_new,
    layer_norm,
)
from clearhead.families.llama_style import COMMON_NAMES, HEAD_NORM_NAMES
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import LAYER, NameTable, renamed, with_biases

_MODEL = "model.layers.{layer}"
_NORM_NAMES: NameTable = with_biases(
    {
        f"{_MODEL}.input_layernorm": f"{LAYER}.attention_residual.norm",
        f"{_MODEL}.post_attention_layernorm": f"{LAYER}.feed_forward_residual.norm",
        "model.norm": "decoder.final_norm",
    }
)


def _norm_without_bias(epsilon: float) -> LayerNorm:
    """Return a LayerNorm with a weight and without a bias."""
    return LayerNorm(epsilon=epsilon, bias=False)


PHI = DecoderRow(
    model_type="phi",
    architecture="PhiForCausalLM",
    epsilon=Setting("layer_norm_eps", 1e-5),
    norm=layer_norm,
    placement="parallel",
    rotary=Rotary(partial=0.5),
    input_bias=True,
    output_bias=True,
    head_norm=NormedHeads(when=Setting("qk_layernorm", False)),
    activation=gelu_new("hidden_act"),
    gated=False,
    feed_forward_bias=True,
    head_bias=True,
    tensor_names={
        **renamed(
            COMMON_NAMES,
            {"o_proj": "dense", "up_proj": "fc1", "down_proj": "fc2", "model.norm.": "model.final_layernorm."},
        ),
        **with_biases(
            {
                f"{_MODEL}.self_attn.q_layernorm": f"{LAYER}.attention.query_norm",
                f"{_MODEL}.self_attn.k_layernorm": f"{LAYER}.attention.key_norm",
                f"{_MODEL}.input_layernorm": f"{LAYER}.attention_residual.norm",
                "model.final_layernorm": "decoder.final_norm",
                "lm_head": "head",
            }
        ),
    },
    presets={
        "phi-2": {
            "hidden_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 10240,
            "partial_rotary_factor": 0.4,
            "vocab_size": 51200,
        }
    },
)
STARCODER2 = DecoderRow(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    context=Setting("max_position_embeddings", 4096),
    epsilon=Setting("norm_epsilon", 1e-5),
    norm=layer_norm,
    num_kv_heads=Setting("num_key_value_heads", 2),
    windows=Windows(size=Setting("sliding_window", None)),
    input_bias=Setting("use_bias", True),
    output_bias=Setting("use_bias", True),
    activation=Setting("hidden_act", "gelu_pytorch_tanh"),
    gated=False,
    feed_forward_bias=Setting("use_bias", True),
    tied=Setting("tie_word_embeddings", True),
    tensor_names={**renamed(COMMON_NAMES, {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}), **_NORM_NAMES},
    presets={
        "starcoder2-3b": {
            "hidden_size": 3072,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "intermediate_size": 12288,
            "max_position_embeddings": 16384,
            "rope_theta": 999999.4420358813,
            "sliding_window": 4096,
            "vocab_size": 49152,
        }
    },
)
STABLELM = DecoderRow(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    context=Setting("max_position_embeddings", 4096),
    epsilon=Setting("layer_norm_eps", 1e-5),
    norm=layer_norm,
    placement=choice("use_parallel_residual", False, {True: "parallel", False: "pre"}),
    num_kv_heads=Setting("num_key_value_heads", 32),
    head_width=None,
    rotary=Rotary(partial=0.25),
    refused={"head_dim": ()},  # transformers uses it for the rotation only
    input_bias=Setting("use_qkv_bias", False),
    output_bias=False,
    head_norm=NormedHeads(when=Setting("qk_layernorm", False), norm=_norm_without_bias, scope="per_head"),
    tensor_names={
        **COMMON_NAMES,
        **_NORM_NAMES,
        f"{_MODEL}.self_attn.q_layernorm.norms.{{head}}.weight": f"{LAYER}.attention.query_norm.weight[{{head}}]",
        f"{_MODEL}.self_attn.k_layernorm.norms.{{kv_head}}.weight": f"{LAYER}.attention.key_norm.weight[{{kv_head}}]",
    },
    presets={
        "stablelm-3b-4e1t": {
            "hidden_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "intermediate_size": 6912,
            "vocab_size": 50304,
        }
    },
)
NEMOTRON = DecoderRow(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    context=Setting("max_position_embeddings", 4096),
    epsilon=Setting("norm_eps", 1e-5),
    norm=lambda epsilon: LayerNorm(epsilon=epsilon, unit_offset=True),
    rotary=Rotary(partial=0.5),
    activation=Setting("hidden_act", "relu2"),
    gated=False,
    feed_forward_bias=Setting("mlp_bias", False),
    tensor_names={**COMMON_NAMES, **_NORM_NAMES},
    presets={
        "minitron-4b": {
            "hidden_size": 3072,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 9216,
            "vocab_size": 256000,
        }
    },
)


# --- Cohere: Command-R


def _every_nth_full(settings: Settings, num_layers: int) -> list[str]:
    """Return the layer types of Cohere 2: every n-th layer has full attention."""
    every = settings.integer("sliding_window_pattern", 4, at_least=1)
    return [WINDOWED if (index + 1) % every else FULL for index in range(num_layers)]


_COHERE: dict[str, Any] = {
    "context": Setting("max_position_embeddings", 8192),
    "epsilon": Setting("layer_norm_eps", 1e-5),
    "norm": _norm_without_bias,
    "placement": "parallel",
    "tied": Setting("tie_word_embeddings", True),
    "head_scale": Setting("logit_scale", 0.0625),
    "tensor_names": {
        **COMMON_NAMES,
        **HEAD_NORM_NAMES,
        f"{_MODEL}.input_layernorm.weight": f"{LAYER}.attention_residual.norm.weight",
    },
}
COHERE = DecoderRow(
    **_COHERE,
    model_type="cohere",
    architecture="CohereForCausalLM",
    rotary=Rotary(theta=500000.0, pairing="interleaved"),
    head_norm=NormedHeads(when=Setting("use_qk_norm", False), scope="per_head"),
    presets={
        "command-r": {
            "hidden_size": 8192,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "intermediate_size": 22528,
            "rope_theta": 8000000.0,
            "vocab_size": 256000,
            "max_position_embeddings": 131072,
        }
    },
)
COHERE2 = DecoderRow(
    **_COHERE | {"head_width": None},
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    rotary=Rotary(pairing="interleaved"),
    windows=Windows(size=Setting("sliding_window", 4096), default_types=_every_nth_full, rotates="windowed"),
    presets={
        "command-r7b": {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "rope_theta": 50000.0,
            "logit_scale": 0.25,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
        }
    },
)

ROWS = (PHI, STARCODER2, STABLELM, NEMOTRON, COHERE, COHERE2)
