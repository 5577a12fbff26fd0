"""Close relatives of LLaMA as rows of the decoder table.

Ministral, Granite, Seed-OSS, Helium, Arcee (AFM), Apertus, ERNIE 4.5 and Hunyuan. Sources: the model cards and reports
of these releases, transformers' classes, and the config.json of the releases that the presets name.
"""

import math
from collections.abc import Callable
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.families.decoder_row import FULL, WINDOWED, DecoderRow, NormedHeads, Rotary, Setting, Windows
from clearhead.families.llama_style import HEAD_NORM_NAMES, PRE_NORM_NAMES
from clearhead.families.rope import rope_parameters
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import LAYER, renamed

_MODEL = "model.layers.{layer}"


def _all_windowed(settings: Settings, num_layers: int) -> list[str]:
    """Return the layer types of Ministral: all layers have the window, if there is one."""
    return [WINDOWED if "sliding_window" in settings else FULL] * num_layers


MINISTRAL = DecoderRow(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    context=Setting("max_position_embeddings", 131072),
    num_kv_heads=Setting("num_key_value_heads", 8),
    windows=Windows(size=Setting("sliding_window", 4096), default_types=_all_windowed),
    input_bias=False,
    output_bias=False,
    tensor_names=PRE_NORM_NAMES,
    presets={
        "ministral-8b": {
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 12288,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000000.0,
            "sliding_window": 32768,
            "vocab_size": 131072,
        }
    },
)


def inverse(name: str, default: float) -> Setting:
    """Return a setting that divides where our config multiplies."""
    return Setting(name, default, lambda divisor: 1 / divisor if divisor else math.inf, _divisor_of)


def _divisor_of(factor: float) -> float:
    """Return the number whose inverse is exactly `factor`; raise ClearheadError if there is none."""
    nearest = 1 / factor
    for candidate in (nearest, math.nextafter(nearest, 0), math.nextafter(nearest, math.inf)):
        if 1 / candidate == factor:
            return candidate
    raise ClearheadError(f"no divisor has exactly the effect of the factor {factor}")


GRANITE_SCALES: dict[str, Any] = {
    "embedding_scale": Setting("embedding_multiplier", 1.0),
    "branch_scale": Setting("residual_multiplier", 1.0),
    "score_scale": Setting("attention_multiplier", 1.0),
    "head_scale": inverse("logits_scaling", 1.0),
}
GRANITE = DecoderRow(
    **GRANITE_SCALES,
    model_type="granite",
    architecture="GraniteForCausalLM",
    feed_forward_bias=Setting("mlp_bias", False),
    tensor_names=PRE_NORM_NAMES,
    presets={
        "granite-3.1-2b": {
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5000000.0,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
            "vocab_size": 49155,
        }
    },
)
SEED_OSS = DecoderRow(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    context=Setting("max_position_embeddings", 524288),
    num_kv_heads=Setting("num_key_value_heads", 8),
    head_width=Setting("head_dim", 128),
    input_bias=Setting("attention_bias", True),
    output_bias=Setting("attention_out_bias", False),
    feed_forward_bias=Setting("mlp_bias", False),
    tensor_names=PRE_NORM_NAMES,
    presets={
        "seed-oss-36b": {
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "intermediate_size": 27648,
            "rope_theta": 10000000.0,
            "vocab_size": 155136,
        }
    },
)
HELIUM = DecoderRow(
    model_type="helium",
    architecture="HeliumForCausalLM",
    context=Setting("max_position_embeddings", 4096),
    epsilon=Setting("rms_norm_eps", 1e-8),
    num_kv_heads=Setting("num_key_value_heads", 20),
    head_width=Setting("head_dim", 128),
    rotary=Rotary(theta=100000.0, pairing="interleaved"),
    output_bias=False,
    feed_forward_bias=Setting("mlp_bias", False),
    tensor_names=PRE_NORM_NAMES,
    presets={
        "helium-1-2b": {
            "hidden_size": 2048,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "intermediate_size": 8192,
            "rope_theta": 20000.0,
            "vocab_size": 64000,
        }
    },
)
ARCEE = DecoderRow(
    model_type="arcee",
    architecture="ArceeForCausalLM",
    context=Setting("max_position_embeddings", 4096),
    epsilon=Setting("rms_norm_eps", 1e-5),
    activation=Setting("hidden_act", "relu2"),
    gated=False,
    feed_forward_bias=Setting("mlp_bias", False),
    tensor_names=PRE_NORM_NAMES,
    presets={
        "afm-4.5b": {
            "hidden_size": 2560,
            "num_hidden_layers": 36,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 18432,
            "max_position_embeddings": 65536,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 20.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
            },
            "vocab_size": 128004,
        }
    },
)


# --- settings that stand in for absent rotary settings


def with_default_rope(parameters: dict[str, Any]) -> Callable[[Settings], Settings]:
    """Return a `prepare` that sets `rope_parameters` if config.json has none."""

    def prepare(settings: Settings) -> Settings:
        if "rope_parameters" in settings:
            return settings
        return Settings({**settings.data, "rope_parameters": parameters}, settings.where)

    return prepare


APERTUS = DecoderRow(
    model_type="apertus",
    architecture="ApertusForCausalLM",
    context=Setting("max_position_embeddings", 65536),
    epsilon=Setting("rms_norm_eps", 1e-5),
    rotary=Rotary(theta=12000000.0),
    head_norm=NormedHeads(),
    activation=Setting("hidden_act", "xielu"),
    gated=False,
    prepare=with_default_rope(
        {
            "rope_type": "llama3",
            "rope_theta": 12000000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
    ),
    tensor_names={
        **renamed(
            PRE_NORM_NAMES,
            {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"},
        ),
        **HEAD_NORM_NAMES,
        f"{_MODEL}.mlp.act_fn.alpha_p": f"{LAYER}.feed_forward.activation.positive",
        f"{_MODEL}.mlp.act_fn.alpha_n": f"{LAYER}.feed_forward.activation.negative",
        f"{_MODEL}.mlp.act_fn.beta": f"{LAYER}.feed_forward.activation.beta",
        f"{_MODEL}.mlp.act_fn.eps": f"{LAYER}.feed_forward.activation.epsilon",
    },
    presets={
        "apertus-8b": {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 21504,
            "vocab_size": 131072,
        }
    },
)
ERNIE4_5 = DecoderRow(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    context=Setting("max_position_embeddings", 131072),
    epsilon=Setting("rms_norm_eps", 1e-5),
    num_kv_heads=Setting("num_key_value_heads", 2),
    head_width=Setting("head_dim", 128),
    rotary=Rotary(theta=500000.0, pairing="interleaved"),
    input_bias=Setting("use_bias", False),
    output_bias=Setting("use_bias", False),
    feed_forward_bias=Setting("use_bias", False),
    tied=Setting("tie_word_embeddings", True),
    tensor_names=PRE_NORM_NAMES,
    presets={
        "ernie-4.5-0.3b": {
            "hidden_size": 1024,
            "num_hidden_layers": 18,
            "num_attention_heads": 16,
            "intermediate_size": 3072,
            "vocab_size": 103424,
        }
    },
)


def _prepare_hunyuan(settings: Settings) -> Settings:
    """Return the settings with the larger rotary base that "dynamic" scaling with a fixed `alpha` stands for."""
    parameters = rope_parameters(settings)
    alpha = parameters.number("alpha", 0.0)
    if parameters.string("rope_type", parameters.string("type", "default")) != "dynamic" or not alpha:
        return settings
    width = settings.integer("head_dim", at_least=4)
    theta = parameters.number("rope_theta", settings.number("rope_theta", 10000.0))
    scaled = {"rope_type": "default", "rope_theta": theta * alpha ** (width / (width - 2))}
    return Settings({**settings.data, "rope_scaling": None, "rope_parameters": scaled}, settings.where)


HUNYUAN = DecoderRow(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    epsilon=Setting("rms_norm_eps", 1e-5),
    head_norm=NormedHeads(after_rotation=True),
    prepare=_prepare_hunyuan,
    tensor_names={
        **PRE_NORM_NAMES,
        f"{_MODEL}.self_attn.query_layernorm.weight": f"{LAYER}.attention.query_norm.weight",
        f"{_MODEL}.self_attn.key_layernorm.weight": f"{LAYER}.attention.key_norm.weight",
    },
    presets={
        "hunyuan-7b": {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        }
    },
)

ROWS = (MINISTRAL, GRANITE, SEED_OSS, HELIUM, ARCEE, APERTUS, ERNIE4_5, HUNYUAN)
