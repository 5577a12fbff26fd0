"""Decoders with mixtures of experts, as rows of the decoder table.

Mixtral, Granite-MoE, OLMoE, Qwen2-MoE and gpt-oss. Sources: Jiang et al. 2024; IBM 2024; Muennighoff et al. 2024; Qwen
Team 2024; OpenAI 2025; transformers' classes, and the config.json of the releases that the presets name.
"""

from clearhead.architecture import RmsNorm
from clearhead.families.decoder_experts import ExpertRow, ExpertSetting
from clearhead.families.decoder_row import FULL, WINDOWED, DecoderRow, NormedHeads, Rotary, Setting, Windows
from clearhead.families.decoder_rows_gemma import JOINT_HEAD_NORM_NAMES, every_nth_full
from clearhead.families.decoder_rows_llama import GRANITE_SCALES, with_default_rope
from clearhead.families.llama_style import EXPERT_NAMES, PRE_NORM_NAMES
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import (
    LAYER,
    Alternating,
    Copy,
    Fused,
    NameTable,
    renamed,
)

_MODEL = "model.layers.{layer}"
_GATE, _UP, _DOWN = (f"{LAYER}.feed_forward.{part}" for part in ("gate", "up", "down"))
MIXTRAL = DecoderRow(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    context=Setting("max_position_embeddings", 131072),
    epsilon=Setting("rms_norm_eps", 1e-5),
    num_kv_heads=Setting("num_key_value_heads", 8),
    rotary=Rotary(theta=1000000.0),
    windows=Windows(size=Setting("sliding_window", None)),
    input_bias=False,
    output_bias=False,
    experts=ExpertRow(
        num_experts=ExpertSetting("num_local_experts", 8),
        num_chosen=ExpertSetting("num_experts_per_tok", 2),
        width=ExpertSetting("intermediate_size"),
    ),
    tensor_names={
        **PRE_NORM_NAMES,
        f"{_MODEL}.block_sparse_moe.gate.weight": f"{LAYER}.feed_forward.router.weight",
        f"{_MODEL}.block_sparse_moe.experts.{{expert}}.w1.weight": f"{_GATE}[{{expert}}]",
        f"{_MODEL}.block_sparse_moe.experts.{{expert}}.w2.weight": f"{_DOWN}[{{expert}}]",
        f"{_MODEL}.block_sparse_moe.experts.{{expert}}.w3.weight": f"{_UP}[{{expert}}]",
    },
    presets={
        "mixtral-8x7b": {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "vocab_size": 32000,
        }
    },
)
GRANITE_MOE = DecoderRow(
    **GRANITE_SCALES,
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    experts=ExpertRow(
        num_experts=ExpertSetting("num_local_experts", 8),
        num_chosen=ExpertSetting("num_experts_per_tok", 2),
        width=ExpertSetting("intermediate_size"),
    ),
    tensor_names={
        **PRE_NORM_NAMES,
        f"{_MODEL}.block_sparse_moe.router.layer.weight": f"{LAYER}.feed_forward.router.weight",
        f"{_MODEL}.block_sparse_moe.input_linear.weight": Fused((_GATE, _UP)),
        f"{_MODEL}.block_sparse_moe.output_linear.weight": _DOWN,
    },
    presets={
        "granite-3.1-1b-a400m": {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "intermediate_size": 512,
            "num_local_experts": 32,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 1500000.0,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
            "logits_scaling": 6.0,
            "tie_word_embeddings": True,
            "vocab_size": 49155,
        }
    },
)
OLMOE = DecoderRow(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    context=Setting("max_position_embeddings", 4096),
    epsilon=Setting("rms_norm_eps", 1e-5),
    head_width=None,
    head_norm=NormedHeads(scope="joint"),
    refused={"clip_qkv": ()},  # it clips after the norm, and no release clips
    experts=ExpertRow(
        num_experts=ExpertSetting("num_experts", 64),
        num_chosen=ExpertSetting("num_experts_per_tok", 8),
        width=ExpertSetting("intermediate_size"),
        renormalized=("norm_topk_prob", False),
    ),
    tensor_names={**PRE_NORM_NAMES, **EXPERT_NAMES, **JOINT_HEAD_NORM_NAMES},
    presets={
        "olmoe-1b-7b": {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "intermediate_size": 1024,
            "vocab_size": 50304,
        }
    },
)


# --- Qwen2-MoE


def _qwen_windows(settings: Settings, num_layers: int) -> list[str]:
    """Return the layer types: every other layer before `max_window_layers` may have the window."""
    windowed, last = settings.boolean("use_sliding_window", False), settings.integer("max_window_layers", 28)
    return [WINDOWED if windowed and (index + 1) % 2 and index < last else FULL for index in range(num_layers)]


def _qwen_sparse_layers(settings: Settings, num_layers: int) -> list[bool]:
    step, only_dense = settings.integer("decoder_sparse_step", 1, at_least=1), settings.array("mlp_only_layers")
    return [index not in only_dense and (index + 1) % step == 0 for index in range(num_layers)]


def _prepare_qwen(settings: Settings) -> Settings:
    """Return the settings without the window if `use_sliding_window` is false: transformers then sets it to 0."""
    data = {**settings.data, "num_experts": settings.data.get("num_experts", settings.data.get("num_local_experts"))}
    if not settings.boolean("use_sliding_window", False):
        data["sliding_window"] = None
    return Settings(data, settings.where)


QWEN2_MOE = DecoderRow(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    context=Setting("max_position_embeddings", 32768),
    num_kv_heads=Setting("num_key_value_heads", 16),
    windows=Windows(size=Setting("sliding_window", 4096), default_types=_qwen_windows),
    input_bias=Setting("qkv_bias", True),
    output_bias=False,
    prepare=_prepare_qwen,
    finish=lambda data: data | {"use_sliding_window": data.get("sliding_window") is not None},
    experts=ExpertRow(
        num_experts=ExpertSetting("num_experts", 60),
        num_chosen=ExpertSetting("num_experts_per_tok", 4),
        width=ExpertSetting("moe_intermediate_size", 1408),
        renormalized=("norm_topk_prob", False),
        shared_width=ExpertSetting("shared_expert_intermediate_size", 5632),
        shared_gate=True,
        sparse_layers=_qwen_sparse_layers,
        write_sparse_layers=lambda sparse: {
            "mlp_only_layers": [i for i, is_sparse in enumerate(sparse) if not is_sparse]
        },
    ),
    tensor_names={
        **PRE_NORM_NAMES,
        **EXPERT_NAMES,
        f"{_MODEL}.mlp.shared_expert.gate_proj.weight": f"{LAYER}.feed_forward.shared.gate.weight",
        f"{_MODEL}.mlp.shared_expert.up_proj.weight": f"{LAYER}.feed_forward.shared.up.weight",
        f"{_MODEL}.mlp.shared_expert.down_proj.weight": f"{LAYER}.feed_forward.shared.down.weight",
        f"{_MODEL}.mlp.shared_expert_gate.weight": f"{LAYER}.feed_forward.shared_gate.weight",
    },
    presets={
        "qwen1.5-moe-a2.7b": {
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 5632,
            "max_position_embeddings": 8192,
            "rope_theta": 1000000.0,
            "vocab_size": 151936,
        }
    },
)


# --- gpt-oss

_GPT_OSS_NAMES: NameTable = {
    **renamed(PRE_NORM_NAMES, {"mlp.": None}),
    f"{_MODEL}.self_attn.sinks": f"{LAYER}.attention.sinks",
    f"{_MODEL}.mlp.router.weight": f"{LAYER}.feed_forward.router.weight",
    f"{_MODEL}.mlp.router.bias": f"{LAYER}.feed_forward.router.bias",
    f"{_MODEL}.mlp.experts.gate_up_proj": Alternating((_GATE, _UP), transposed=True),
    f"{_MODEL}.mlp.experts.gate_up_proj_bias": Alternating((f"{_GATE}_bias", f"{_UP}_bias")),
    f"{_MODEL}.mlp.experts.down_proj": Copy((_DOWN,), transposed=True),
    f"{_MODEL}.mlp.experts.down_proj_bias": f"{_DOWN}_bias",
}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
GPT_OSS = DecoderRow(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    context=Setting("max_position_embeddings", 131072),
    epsilon=Setting("rms_norm_eps", 1e-5),
    norm=lambda epsilon: RmsNorm(epsilon=epsilon, scale_in_float32=True),
    num_kv_heads=Setting("num_key_value_heads", 8),
    head_width=Setting("head_dim", 64),
    rotary=Rotary(theta=150000.0),
    windows=Windows(size=Setting("sliding_window", 128), default_types=every_nth_full(2)),
    input_bias=Setting("attention_bias", True),
    output_bias=Setting("attention_bias", True),
    sinks=True,
    refused={"swiglu_alpha": (1.702,)},
    prepare=with_default_rope({**_GPT_OSS_ROPE, "original_max_position_embeddings": 4096}),
    experts=ExpertRow(
        num_experts=ExpertSetting("num_local_experts", 128),
        num_chosen=ExpertSetting("num_experts_per_tok", 4),
        width=ExpertSetting("intermediate_size"),
        activation="gelu_quick",
        clamp=("swiglu_limit", 7.0),
        bias=True,
    ),
    tensor_names=_GPT_OSS_NAMES,
    presets={
        "gpt-oss-20b": {
            "hidden_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_local_experts": 32,
            "intermediate_size": 2880,
            "vocab_size": 201088,
        }
    },
)

ROWS = (MIXTRAL, GRANITE_MOE, OLMOE, QWEN2_MOE, GPT_OSS)
