"""Phi-3 to Phi-4, GLM, GLM-4 and GLM-4-MoE (4.5 to 4.7) as rows of the decoder table.

In the first three, gate and up projections are one matrix. Sources: Abdin et al. 2024a and 2024b; GLM Team 2024 and
2025; transformers' classes, and the config.json of the releases that the presets name.
"""

from collections.abc import Sequence
from typing import Any

from clearhead.families.decoder_experts import ExpertRow, ExpertSetting, grouped_router, write_grouped_router
from clearhead.families.decoder_row import DecoderRow, NormedHeads, Rotary, Setting, Windows
from clearhead.families.llama_style import EXPERT_NAMES, HEAD_NORM_NAMES, PRE_NORM_NAMES
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import LAYER, NUM_LAYERS_PLACEHOLDER, QKV_WEIGHTS, Fused, NameTable, renamed

_MODEL = "model.layers.{layer}"
_GATE_UP: NameTable = {
    f"{_MODEL}.mlp.gate_up_proj.weight": Fused((f"{LAYER}.feed_forward.gate.weight", f"{LAYER}.feed_forward.up.weight"))
}
_FUSED_NAMES: NameTable = {**renamed(PRE_NORM_NAMES, {"mlp.gate_proj": None, "mlp.up_proj": None}), **_GATE_UP}


# --- Phi-3, Phi-3.5 and Phi-4


def _prepare_phi3(settings: Settings) -> Settings:
    """Return the settings with today's name of LongRoPE, which older files call "su" or "yarn"."""
    name = "rope_scaling" if settings.object("rope_scaling").data else "rope_parameters"
    parameters = settings.object(name)
    rope_type = parameters.string("rope_type", parameters.string("type", "default"))
    if rope_type not in ("su", "yarn"):
        return settings
    return Settings({**settings.data, name: {**parameters.data, "rope_type": "longrope"}}, settings.where)


def _finish_phi3(data: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the original length at the top level, which takes precedence there."""
    length = "original_max_position_embeddings"
    return data | {length: data.get("rope_parameters", {}).get(length, data["max_position_embeddings"])}


PHI3 = DecoderRow(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    context=Setting("max_position_embeddings", 4096),
    epsilon=Setting("rms_norm_eps", 1e-5),
    rotary=Rotary(partial=1.0),
    windows=Windows(size=Setting("sliding_window", None)),
    input_bias=False,
    output_bias=False,
    defaults={"original_max_position_embeddings": 4096},
    prepare=_prepare_phi3,
    finish=_finish_phi3,
    tensor_names={
        **renamed(_FUSED_NAMES, {"q_proj": None, "k_proj": None, "v_proj": None}),
        f"{_MODEL}.self_attn.qkv_proj.weight": Fused(QKV_WEIGHTS),
    },
    presets={
        "phi-3-mini-4k": {
            "hidden_size": 3072,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 8192,
            "sliding_window": 2047,
            "vocab_size": 32064,
        },
        "phi-4": {
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "intermediate_size": 17920,
            "max_position_embeddings": 16384,
            "original_max_position_embeddings": 16384,
            "rope_theta": 250000.0,
            "vocab_size": 100352,
        },
    },
)

# --- GLM

_GLM: dict[str, Any] = {
    "context": Setting("max_position_embeddings", 131072),
    "epsilon": Setting("rms_norm_eps", 1.5625e-7),
    "num_kv_heads": Setting("num_key_value_heads", 2),
    "head_width": Setting("head_dim", 128),
    "rotary": Rotary(pairing="interleaved", partial=0.5),
    "input_bias": Setting("attention_bias", True),
    "output_bias": False,
}
_GLM_9B = {
    "hidden_size": 4096,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "intermediate_size": 13696,
    "vocab_size": 151552,
}
GLM = DecoderRow(
    **_GLM,
    model_type="glm",
    architecture="GlmForCausalLM",
    tensor_names=_FUSED_NAMES,
    presets={"glm-4-9b": _GLM_9B},
)
GLM4 = DecoderRow(
    **_GLM,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    placement="sandwich",
    tensor_names={
        **_FUSED_NAMES,
        f"{_MODEL}.post_self_attn_layernorm.weight": f"{LAYER}.attention_residual.branch_norm.weight",
        f"{_MODEL}.post_mlp_layernorm.weight": f"{LAYER}.feed_forward_residual.branch_norm.weight",
    },
    presets={"glm-4-9b-0414": {**_GLM_9B, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5}},
)

# --- GLM-4-MoE


def _first_dense(settings: Settings, num_layers: int) -> list[bool]:
    num_dense = settings.integer("first_k_dense_replace", 1)
    return [index >= num_dense for index in range(num_layers)]


def _write_first_dense(sparse: Sequence[bool]) -> dict[str, Any]:
    return {"first_k_dense_replace": sum(not is_sparse for is_sparse in sparse)}


GLM4_MOE = DecoderRow(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    context=Setting("max_position_embeddings", 131072),
    epsilon=Setting("rms_norm_eps", 1e-5),
    num_kv_heads=Setting("num_key_value_heads", 8),
    rotary=Rotary(partial=0.5),
    output_bias=False,
    head_norm=NormedHeads(when=Setting("use_qk_norm", False)),
    experts=ExpertRow(
        num_experts=ExpertSetting("n_routed_experts", 128),
        num_chosen=ExpertSetting("num_experts_per_tok", 8),
        width=ExpertSetting("moe_intermediate_size", 1408),
        renormalized=("norm_topk_prob", True),
        shared_count=ExpertSetting("n_shared_experts", 1),
        router=grouped_router,
        write_router=write_grouped_router,
        sparse_layers=_first_dense,
        write_sparse_layers=_write_first_dense,
    ),
    ignored_tensors=(
        rf"model\.layers\.{NUM_LAYERS_PLACEHOLDER}\..*",
    ),  # the layer that predicts the token after the next
    tensor_names={
        **PRE_NORM_NAMES,
        **EXPERT_NAMES,
        **HEAD_NORM_NAMES,
        f"{_MODEL}.mlp.gate.e_score_correction_bias": f"{LAYER}.feed_forward.router.selection_bias",
        f"{_MODEL}.mlp.shared_experts.gate_proj.weight": f"{LAYER}.feed_forward.shared.gate.weight",
        f"{_MODEL}.mlp.shared_experts.up_proj.weight": f"{LAYER}.feed_forward.shared.up.weight",
        f"{_MODEL}.mlp.shared_experts.down_proj.weight": f"{LAYER}.feed_forward.shared.down.weight",
    },
    presets={
        "glm-4.5-air": {
            "hidden_size": 4096,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 10944,
            "attention_bias": True,
            "rope_theta": 1000000.0,
            "vocab_size": 151552,
        }
    },
)

ROWS = (PHI3, GLM, GLM4, GLM4_MOE)
