"""Decoders with unusual norms, as rows of the decoder table: Gemma 1 and 2, OLMo 1 to 3, EXAONE 4.

Sources: Gemma Team 2024a and 2024b; Groeneveld et al. 2024, OLMo Team 2024 and 2025; LG AI Research 2025; transformers'
classes, and the config.json of the releases that the presets name.
"""

from collections.abc import Callable
from typing import Any

from clearhead.architecture import LayerNorm, RmsNorm
from clearhead.families.decoder_row import FULL, WINDOWED, DecoderRow, NormedHeads, Rotary, Setting, Windows
from clearhead.families.llama_style import COMMON_NAMES, HEAD_NORM_NAMES, PRE_NORM_NAMES
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import LAYER, NameTable

_MODEL = "model.layers.{layer}"


def every_nth_full(every: int) -> Callable[[Settings, int], list[str]]:
    """Return the `default_types` in which every n-th layer has full attention."""
    return lambda settings, num_layers: [WINDOWED if (index + 1) % every else FULL for index in range(num_layers)]


# --- Gemma 1 and 2


def _unit_offset_norm(epsilon: float) -> RmsNorm:
    return RmsNorm(epsilon=epsilon, unit_offset=True, scale_in_float32=True)


def _prepare_gemma(settings: Settings) -> Settings:
    """Return the settings with the activation of the releases, whose files say "gelu" and mean its tanh form."""
    if settings.data.get("hidden_act") != "gelu":
        return settings
    return Settings({**settings.data, "hidden_act": "gelu_pytorch_tanh"}, settings.where)


_GEMMA: dict[str, Any] = {
    "context": Setting("max_position_embeddings", 8192),
    "norm": _unit_offset_norm,
    "scaled_by_width": True,
    "head_width": Setting("head_dim", 256),
    "tied": Setting("tie_word_embeddings", True),
    "refused": {"use_bidirectional_attention": (False,)},
}
GEMMA = DecoderRow(
    **_GEMMA,
    model_type="gemma",
    architecture="GemmaForCausalLM",
    num_kv_heads=Setting("num_key_value_heads", 16),
    activation=Setting("hidden_act", "gelu_pytorch_tanh"),
    prepare=_prepare_gemma,
    tensor_names=PRE_NORM_NAMES,
    presets={
        "gemma-2b": {
            "hidden_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "intermediate_size": 16384,
            "vocab_size": 256000,
        }
    },
)
GEMMA2 = DecoderRow(
    **_GEMMA,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    placement="sandwich",
    num_kv_heads=Setting("num_key_value_heads", 4),
    windows=Windows(size=Setting("sliding_window", 4096), default_types=every_nth_full(2)),
    score_scale=Setting(
        "query_pre_attn_scalar",
        256,
        lambda scalar: scalar**-0.5 if scalar > 0 else 0.0,
        lambda scale: None if scale is None else round(scale**-2),
    ),
    softcap=Setting("attn_logit_softcapping", 50.0),
    activation=Setting("hidden_activation", "gelu_pytorch_tanh"),
    head_softcap=Setting("final_logit_softcapping", 30.0),
    tensor_names={
        **COMMON_NAMES,
        f"{_MODEL}.input_layernorm.weight": f"{LAYER}.attention_residual.norm.weight",
        f"{_MODEL}.post_attention_layernorm.weight": f"{LAYER}.attention_residual.branch_norm.weight",
        f"{_MODEL}.pre_feedforward_layernorm.weight": f"{LAYER}.feed_forward_residual.norm.weight",
        f"{_MODEL}.post_feedforward_layernorm.weight": f"{LAYER}.feed_forward_residual.branch_norm.weight",
    },
    presets={
        "gemma-2-2b": {
            "hidden_size": 2304,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "intermediate_size": 9216,
            "vocab_size": 256000,
        }
    },
)


# --- OLMo and EXAONE: norms without weights, then norms of the branches' outputs

_BRANCH_NORM_NAMES: NameTable = {
    **COMMON_NAMES,
    f"{_MODEL}.post_attention_layernorm.weight": f"{LAYER}.attention_residual.branch_norm.weight",
    f"{_MODEL}.post_feedforward_layernorm.weight": f"{LAYER}.feed_forward_residual.branch_norm.weight",
}
JOINT_HEAD_NORM_NAMES: NameTable = {
    f"{_MODEL}.self_attn.q_norm.weight": f"{LAYER}.attention.query_norm.norm.weight",
    f"{_MODEL}.self_attn.k_norm.weight": f"{LAYER}.attention.key_norm.norm.weight",
}
OLMO = DecoderRow(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    epsilon=1e-5,
    norm=lambda epsilon: LayerNorm(epsilon=epsilon, weight=False, bias=False),
    clip=Setting("clip_qkv", None),
    tensor_names=COMMON_NAMES,
    presets={
        "olmo-1b": {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "intermediate_size": 8192,
            "tie_word_embeddings": True,
            "vocab_size": 50304,
        }
    },
)
_OLMO2: dict[str, Any] = {
    "epsilon": Setting("rms_norm_eps", 1e-5),
    "norm": lambda epsilon: RmsNorm(epsilon=epsilon, scale_in_float32=True),
    "placement": "branch",
    "head_norm": NormedHeads(scope="joint"),
    "tensor_names": {**_BRANCH_NORM_NAMES, **JOINT_HEAD_NORM_NAMES},
}
OLMO2 = DecoderRow(
    **_OLMO2,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    presets={
        "olmo-2-1b": {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 500000.0,
            "vocab_size": 100352,
        }
    },
)
OLMO3 = DecoderRow(
    **_OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    rotary=Rotary(theta=500000.0, by_layer_type=True),
    windows=Windows(size=Setting("sliding_window", 4096), default_types=every_nth_full(4)),
    presets={
        "olmo-3-7b": {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 11008,
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
            "vocab_size": 100278,
        }
    },
)


def _exaone_types(settings: Settings, num_layers: int) -> list[str]:
    """Return the layer types of EXAONE 4: every n-th layer has full attention."""
    every = settings.integer("sliding_window_pattern", 4, at_least=1)
    return every_nth_full(every)(settings, num_layers)


EXAONE4 = DecoderRow(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    epsilon=Setting("rms_norm_eps", 1e-5),
    placement="branch",
    num_kv_heads=Setting("num_key_value_heads", 32),
    windows=Windows(size=Setting("sliding_window", 4096), default_types=_exaone_types, rotates="windowed_if_any"),
    input_bias=False,
    output_bias=False,
    head_norm=NormedHeads(),
    tensor_names={**_BRANCH_NORM_NAMES, **HEAD_NORM_NAMES},
    presets={
        "exaone-4.0-32b": {
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 27392,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "vocab_size": 102400,
        }
    },
)

ROWS = (GEMMA, GEMMA2, OLMO, OLMO2, OLMO3, EXAONE4)
