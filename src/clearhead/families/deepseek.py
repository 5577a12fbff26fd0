"""DeepSeek-V2 and V3: latent attention; a few dense layers followed by layers with many small experts.

Sources: DeepSeek-V2 (2024, §2.1 and §3.1), DeepSeek-V3 (2024, §2.1 and §4.2), the config.json of each release.
V2 scores experts by softmax and restricts a token to the groups with the best single expert. V3 scores by sigmoid,
adds a bias for the selection only, and ranks groups by the sum of their two best experts. The score scale contains
the square of YaRN's magnitude.
"""

from typing import Any, Literal

from clearhead.architecture import (
    ExpertGroups,
    Experts,
    FeedForward,
    Head,
    LatentAttention,
    ModelConfig,
    RmsNorm,
    Rope,
    Router,
    Stack,
    YarnScaling,
)
from clearhead.errors import ClearheadError, unknown_name
from clearhead.families.family import Family, Preset, require_round_trip, require_type
from clearhead.families.llama_style import (
    DUPLICATES,
    EXPERT_NAMES,
    IGNORED_TENSORS,
    PRE_NORM_NAMES,
    activation_name,
    decoder_only_config,
    first_experts,
    first_feed_forward,
    gated_feed_forward,
    require_divisible_width,
    write_sizes,
)
from clearhead.families.rope import (
    read_rope,
    recover_mscale,
    rope_parameters,
    write_rope,
    yarn_factor,
    yarn_score_scale,
)
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import LAYER, NUM_LAYERS_PLACEHOLDER, NameTable


def _deepseek_preset(
    width: int,
    num_layers: int,
    num_heads: int,
    dense_width: int,
    experts: Experts,
    *,
    query_rank: int | None,
    mscale: float,
    num_dense: int = 1,
    vocab_size: int = 102400,
) -> Preset:
    """Return a preset; all sizes extend the context with the same YaRN scaling, V2-Lite with a smaller magnitude."""
    yarn = YarnScaling(factor=40.0, original_context=4096, attention_factor=1.0)
    attention = LatentAttention(
        num_heads=num_heads,
        query_rank=query_rank,
        latent_rank=512,
        plain_width=128,
        rotary_width=64,
        value_width=128,
        rope=Rope(pairing="interleaved", scaling=yarn),
        scale=yarn_score_scale(128 + 64, yarn.factor, mscale),
    )
    return lambda: decoder_only_config(
        width=width,
        context=163840,
        vocab_size=vocab_size,
        attentions=[attention] * num_layers,
        feed_forwards=[gated_feed_forward(dense_width)] * num_dense + [experts] * (num_layers - num_dense),
        norm=RmsNorm(epsilon=1e-6),
        head=Head(tied=False),
    )


def _router_v2(groups: ExpertGroups | None, scale: float) -> Router:
    return Router(score="softmax", groups=groups, scale=scale)


def _router_v3(groups: ExpertGroups | None, scale: float, renormalized: bool = True) -> Router:
    return Router(
        score="sigmoid",
        selection_bias=True,
        groups=groups,
        renormalize_epsilon=1e-20 if renormalized else None,
        scale=scale,
    )


def mixture(num_experts: int, num_chosen: int, expert: FeedForward, num_shared: int, router: Router) -> Experts:
    """Return a mixture of experts; its shared experts are one feed-forward, `num_shared` times as wide."""
    shared = gated_feed_forward(num_shared * expert.width, expert.activation)
    return Experts(num_experts=num_experts, num_chosen=num_chosen, expert=expert, router=router, shared=shared)


_V2_LITE_EXPERTS = mixture(64, 6, gated_feed_forward(1408), 2, _router_v2(None, 1.0))
_V2_GROUPS = ExpertGroups(num_groups=8, num_kept=3, scored_by="max")
_V3_GROUPS = ExpertGroups(num_groups=8, num_kept=4, scored_by="top2_sum")
_V2_EXPERTS = mixture(160, 6, gated_feed_forward(1536), 2, _router_v2(_V2_GROUPS, 16.0))
_V3_EXPERTS = mixture(256, 8, gated_feed_forward(2048), 1, _router_v3(_V3_GROUPS, 2.5))
PRESETS = {
    "deepseek-v2-lite": _deepseek_preset(2048, 27, 16, 10944, _V2_LITE_EXPERTS, query_rank=None, mscale=0.707),
    "deepseek-v2": _deepseek_preset(5120, 60, 128, 12288, _V2_EXPERTS, query_rank=1536, mscale=1.0),
    "deepseek-v3": _deepseek_preset(
        7168, 61, 128, 18432, _V3_EXPERTS, query_rank=1536, mscale=1.0, num_dense=3, vocab_size=129280
    ),
}


# --- config.json


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes."""
    is_v3 = settings.string("model_type") == "deepseek_v3"
    num_heads, num_layers = settings.integer("num_attention_heads"), settings.integer("num_hidden_layers")
    context = settings.integer("max_position_embeddings", 4096 if is_v3 else 2048)
    settings.allow_only("attention_bias", False)
    settings.allow_only("mlp_bias", False)
    settings.allow_only("num_key_value_heads", num_heads)
    settings.allow_only("moe_layer_freq", 1)
    interleaved = not is_v3 or settings.truth("rope_interleave", True)
    plain, rotary = settings.integer("qk_nope_head_dim", 128), settings.integer("qk_rope_head_dim", 64, at_least=1)
    attention = LatentAttention(
        num_heads=num_heads,
        query_rank=_read_query_rank(settings),
        latent_rank=settings.integer("kv_lora_rank", 512),
        plain_width=plain,
        rotary_width=rotary,
        value_width=settings.integer("v_head_dim", 128),
        rope=read_rope(settings, context, pairing="interleaved" if interleaved else "half"),
        scale=_read_scale(settings, context, plain + rotary),
    )
    dense = gated_feed_forward(settings.integer("intermediate_size"), settings.activation("hidden_act", "silu"))
    num_dense, experts = settings.integer("first_k_dense_replace", 3 if is_v3 else 0), _read_experts(settings, is_v3)
    return decoder_only_config(
        width=settings.integer("hidden_size"),
        context=context,
        vocab_size=settings.integer("vocab_size"),
        attentions=[attention] * num_layers,
        feed_forwards=[dense if index < num_dense else experts for index in range(num_layers)],
        norm=RmsNorm(epsilon=settings.number("rms_norm_eps", 1e-6)),
        head=Head(tied=settings.boolean("tie_word_embeddings", False)),
    )


def _read_query_rank(settings: Settings) -> int | None:
    """Return the rank of the query projection; null means full rank, whereas an absent setting means 1536."""
    return None if settings.data.get("q_lora_rank", 1536) is None else settings.integer("q_lora_rank", 1536)


def _read_scale(settings: Settings, context: int, width: int) -> float | None:
    """Return the score scale; None means width^-1/2.

    transformers' DeepSeek classes apply `mscale_all_dim` for every `rope_type` except "default".
    """
    parameters = rope_parameters(settings)
    mscale = parameters.number("mscale_all_dim", 0.0)
    if not mscale or parameters.string("rope_type", parameters.string("type", "default")) == "default":
        return None
    scale = yarn_score_scale(width, yarn_factor(parameters, context), mscale)
    return None if scale == width**-0.5 else scale


def _read_experts(settings: Settings, is_v3: bool) -> Experts:
    if is_v3:
        settings.allow_only("scoring_func", "sigmoid")
        settings.allow_only("topk_method", "noaux_tc")
        scale = settings.number("routed_scaling_factor", 2.5)
        router = _router_v3(_read_groups(settings, "top2_sum"), scale, settings.truth("norm_topk_prob", True))
    else:
        settings.allow_only("scoring_func", "softmax")
        settings.allow_only("norm_topk_prob", False)  # if True, DeepSeek's code renormalizes, transformers' does not
        method, known = settings.string("topk_method", "greedy"), ("greedy", "group_limited_greedy")
        if method not in known:
            raise unknown_name(f"topk_method in {settings.where}:", method, known)
        groups = None if method == "greedy" else _read_groups(settings, "max")
        router = _router_v2(groups, settings.number("routed_scaling_factor", 1.0))
    expert_width = settings.integer("moe_intermediate_size", 2048 if is_v3 else 1407)
    return mixture(
        settings.integer("n_routed_experts", 256 if is_v3 else 64),
        settings.integer("num_experts_per_tok", 8 if is_v3 else None),
        gated_feed_forward(expert_width, settings.activation("hidden_act", "silu")),
        settings.integer("n_shared_experts", 1 if is_v3 else 2),
        router,
    )


def _read_groups(settings: Settings, scored_by: Literal["max", "top2_sum"]) -> ExpertGroups | None:
    num_groups = settings.integer("n_group", 8)
    if num_groups <= 1:
        return None
    return ExpertGroups(num_groups=num_groups, num_kept=settings.integer("topk_group", 4), scored_by=scored_by)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    stack = require_type(Stack, config.decoder)
    attention, experts = require_type(LatentAttention, stack.layers[0].attention), first_experts(stack)
    is_v2 = experts is not None and experts.router.score == "softmax"
    if is_v2:
        require_divisible_width(config, attention.num_heads)
    # transformers does not use `intermediate_size` in a model without dense layers.
    dense = first_feed_forward(stack) or require_type(Experts, experts).expert
    data = write_sizes(config) | _write_latent(attention)
    data |= {
        "architectures": ["DeepseekV2ForCausalLM" if is_v2 else "DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v2" if is_v2 else "deepseek_v3",
        "rope_interleave": attention.rope.pairing == "interleaved",
        "hidden_act": activation_name(stack),
        "intermediate_size": dense.width,
        "first_k_dense_replace": sum(isinstance(layer.feed_forward, FeedForward) for layer in stack.layers),
    }
    return require_round_trip(data | (_write_experts(experts, is_v2) if experts else {}), config, read_config)


def _write_latent(attention: LatentAttention) -> dict[str, Any]:
    rope, scaling = write_rope(attention.rope), attention.rope.scaling
    if attention.scale is not None:
        width, factor = attention.plain_width + attention.rotary_width, getattr(scaling, "factor", 1.0)
        mscale = recover_mscale(attention.scale, width, factor)
        if mscale is None:
            raise ClearheadError(f"a DeepSeek config.json cannot express the score scale {attention.scale}")
        rope["mscale_all_dim"] = mscale
    return {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_heads,
        "q_lora_rank": attention.query_rank,
        "kv_lora_rank": attention.latent_rank,
        "qk_nope_head_dim": attention.plain_width,
        "qk_rope_head_dim": attention.rotary_width,
        "v_head_dim": attention.value_width,
        "rope_parameters": rope,
    }


def _write_experts(experts: Experts, is_v2: bool) -> dict[str, Any]:
    groups, shared = experts.router.groups, require_type(FeedForward, experts.shared)
    data = {
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_chosen,
        "moe_intermediate_size": experts.expert.width,
        "n_shared_experts": shared.width // experts.expert.width,
        "n_group": groups.num_groups if groups else 1,
        "topk_group": groups.num_kept if groups else 1,
        "routed_scaling_factor": experts.router.scale,
        "norm_topk_prob": experts.router.renormalize_epsilon is not None,
    }
    return data | ({"topk_method": "group_limited_greedy" if groups else "greedy"} if is_v2 else {})


# --- tensor names

NAMES: NameTable = {
    **PRE_NORM_NAMES,
    **EXPERT_NAMES,
    "model.layers.{layer}.mlp.gate.e_score_correction_bias": f"{LAYER}.feed_forward.router.selection_bias",
    "model.layers.{layer}.mlp.shared_experts.gate_proj.weight": f"{LAYER}.feed_forward.shared.gate.weight",
    "model.layers.{layer}.mlp.shared_experts.up_proj.weight": f"{LAYER}.feed_forward.shared.up.weight",
    "model.layers.{layer}.mlp.shared_experts.down_proj.weight": f"{LAYER}.feed_forward.shared.down.weight",
    "model.layers.{layer}.self_attn.q_a_proj.weight": f"{LAYER}.attention.query_down.weight",
    "model.layers.{layer}.self_attn.q_a_layernorm.weight": f"{LAYER}.attention.query_norm.weight",
    "model.layers.{layer}.self_attn.q_b_proj.weight": f"{LAYER}.attention.query_up.weight",
    "model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight": f"{LAYER}.attention.latent.weight",
    "model.layers.{layer}.self_attn.kv_a_layernorm.weight": f"{LAYER}.attention.latent_norm.weight",
    "model.layers.{layer}.self_attn.kv_b_proj.weight": f"{LAYER}.attention.unfold.weight",
}
FAMILY = Family(
    name="deepseek",
    presets=PRESETS,
    model_types=("deepseek_v2", "deepseek_v3"),
    read_config=read_config,
    write_config=write_config,
    tensor_names=NAMES,
    base_model_prefix="model.",
    duplicates=DUPLICATES,
    ignored_tensors=(
        *IGNORED_TENSORS,
        rf"model\.layers\.{NUM_LAYERS_PLACEHOLDER}\..*",  # V3's layer that predicts the token after the next
    ),
)
