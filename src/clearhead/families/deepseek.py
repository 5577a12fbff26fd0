"""DeepSeek-V2 and V3: latent attention and mixtures of many small experts behind a few dense layers.

Sources: DeepSeek-V2 (2024, §2.1 and §3.1), DeepSeek-V3 (2024, §2.1 and §4.2), the config.json of each release.
V2 scores experts by softmax and limits a token to the best groups by their best expert. V3 scores by sigmoid, adds
a bias for the choice alone and ranks groups by their two best. YaRN's magnitude goes into the score scale, squared.
"""

import math
from collections.abc import Callable, Iterator
from itertools import product
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
from clearhead.families import llama
from clearhead.families.family import Family, narrow, said_whole
from clearhead.families.names import AFTER_LAST, LAYER, Table
from clearhead.families.rope import read_rope, rope_parameters, write_rope, yarn_factor, yarn_magnitude
from clearhead.families.settings import Settings
from clearhead.families.trunk import (
    MIXTURE_NAMES,
    activation_name,
    check_heads,
    dense_of,
    experts_of,
    gated,
    language_model,
    write_sizes,
)


def released(
    width: int,
    num_layers: int,
    num_heads: int,
    dense: int,
    experts: Experts,
    *,
    query_rank: int | None,
    mscale: float,
    num_dense: int = 1,
    vocab_size: int = 102400,
) -> Callable[[], ModelConfig]:
    """All were taught the long context by the same YaRN; V2-Lite with a smaller magnitude."""
    yarn = YarnScaling(factor=40.0, original_context=4096, attention_factor=1.0)
    attention = LatentAttention(
        num_heads=num_heads,
        query_rank=query_rank,
        latent_rank=512,
        plain_width=128,
        rotary_width=64,
        value_width=128,
        rope=Rope(pairing="interleaved", scaling=yarn),
        scale=score_scale(128 + 64, yarn.factor, mscale),
    )
    return lambda: language_model(
        width=width,
        context=163840,
        vocab_size=vocab_size,
        attentions=[attention] * num_layers,
        feed_forwards=[gated(dense)] * num_dense + [experts] * (num_layers - num_dense),
        norm=RmsNorm(epsilon=1e-6),
        head=Head(tied=False),
    )


def score_scale(width: int, factor: float, mscale: float) -> float:
    magnitude = yarn_magnitude(factor, mscale)
    return width**-0.5 * magnitude * magnitude


def router_v2(groups: ExpertGroups | None, scale: float) -> Router:
    return Router(score="softmax", groups=groups, scale=scale)


def router_v3(groups: ExpertGroups | None, scale: float, renormalized: bool = True) -> Router:
    return Router(
        score="sigmoid",
        selection_bias=True,
        groups=groups,
        renormalize_epsilon=1e-20 if renormalized else None,
        scale=scale,
    )


def mixture(num_experts: int, num_chosen: int, expert: FeedForward, num_shared: int, router: Router) -> Experts:
    """The shared experts are one feed-forward, `num_shared` times as wide."""
    shared = gated(num_shared * expert.width, expert.activation)
    return Experts(num_experts=num_experts, num_chosen=num_chosen, expert=expert, router=router, shared=shared)


V2_LITE = mixture(64, 6, gated(1408), 2, router_v2(None, 1.0))
V2 = mixture(160, 6, gated(1536), 2, router_v2(ExpertGroups(num_groups=8, num_kept=3, scored_by="max"), 16.0))
V3 = mixture(256, 8, gated(2048), 1, router_v3(ExpertGroups(num_groups=8, num_kept=4, scored_by="top2_sum"), 2.5))
PRESETS = {
    "deepseek-v2-lite": released(2048, 27, 16, 10944, V2_LITE, query_rank=None, mscale=0.707),
    "deepseek-v2": released(5120, 60, 128, 12288, V2, query_rank=1536, mscale=1.0),
    "deepseek-v3": released(7168, 61, 128, 18432, V3, query_rank=1536, mscale=1.0, num_dense=3, vocab_size=129280),
}


# --- transformers' words


def read(settings: Settings) -> ModelConfig:
    third = settings.text("model_type") == "deepseek_v3"
    num_heads, num_layers = settings.whole("num_attention_heads"), settings.whole("num_hidden_layers")
    context = settings.whole("max_position_embeddings", 4096 if third else 2048)
    settings.refuse("attention_bias", False)
    settings.refuse("mlp_bias", False)
    settings.refuse("num_key_value_heads", num_heads)
    settings.refuse("moe_layer_freq", 1)
    interleaved = not third or settings.flag("rope_interleave", True)
    plain, rotary = settings.whole("qk_nope_head_dim", 128), settings.whole("qk_rope_head_dim", 64, at_least=1)
    attention = LatentAttention(
        num_heads=num_heads,
        query_rank=read_query_rank(settings),
        latent_rank=settings.whole("kv_lora_rank", 512),
        plain_width=plain,
        rotary_width=rotary,
        value_width=settings.whole("v_head_dim", 128),
        rope=read_rope(settings, context, pairing="interleaved" if interleaved else "half"),
        scale=read_scale(settings, context, plain + rotary),
    )
    dense = gated(settings.whole("intermediate_size"), settings.activation("hidden_act", "silu"))
    num_dense, experts = settings.whole("first_k_dense_replace", 3 if third else 0), read_experts(settings, third)
    return language_model(
        width=settings.whole("hidden_size"),
        context=context,
        vocab_size=settings.whole("vocab_size"),
        attentions=[attention] * num_layers,
        feed_forwards=[dense if number < num_dense else experts for number in range(num_layers)],
        norm=RmsNorm(epsilon=settings.number("rms_norm_eps", 1e-6)),
        head=Head(tied=settings.flag("tie_word_embeddings", False)),
    )


def read_query_rank(settings: Settings) -> int | None:
    """Absent is not null here: null says that queries are projected straight from the input."""
    return None if settings.data.get("q_lora_rank", 1536) is None else settings.whole("q_lora_rank", 1536)


def read_scale(settings: Settings, context: int, width: int) -> float | None:
    """transformers' DeepSeek classes take `mscale_all_dim` from a rope of any kind but the default."""
    parameters = rope_parameters(settings)
    mscale = parameters.number("mscale_all_dim", 0.0)
    if not mscale or parameters.text("rope_type", parameters.text("type", "default")) == "default":
        return None
    scale = score_scale(width, yarn_factor(parameters, context), mscale)
    return None if scale == width**-0.5 else scale


def read_experts(settings: Settings, third: bool) -> Experts:
    if third:
        settings.refuse("scoring_func", "sigmoid")
        settings.refuse("topk_method", "noaux_tc")
        scale = settings.number("routed_scaling_factor", 2.5)
        router = router_v3(read_groups(settings, "top2_sum"), scale, settings.flag("norm_topk_prob", True))
    else:
        settings.refuse("scoring_func", "softmax")
        settings.refuse("norm_topk_prob", False)  # DeepSeek's code then renormalises, transformers' does not
        method = settings.text("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise unknown_name(f"topk_method in {settings.where}:", method, ("greedy", "group_limited_greedy"))
        groups = None if method == "greedy" else read_groups(settings, "max")
        router = router_v2(groups, settings.number("routed_scaling_factor", 1.0))
    expert_width = settings.whole("moe_intermediate_size", 2048 if third else 1407)
    return mixture(
        settings.whole("n_routed_experts", 256 if third else 64),
        settings.whole("num_experts_per_tok", 8 if third else None),
        gated(expert_width, settings.activation("hidden_act", "silu")),
        settings.whole("n_shared_experts", 1 if third else 2),
        router,
    )


def read_groups(settings: Settings, scored_by: Literal["max", "top2_sum"]) -> ExpertGroups | None:
    num_groups = settings.whole("n_group", 8)
    if num_groups <= 1:
        return None
    return ExpertGroups(num_groups=num_groups, num_kept=settings.whole("topk_group", 4), scored_by=scored_by)


def write(config: ModelConfig) -> dict[str, Any]:
    stack = narrow(Stack, config.decoder)
    attention, experts = narrow(LatentAttention, stack.layers[0].attention), experts_of(stack)
    second = experts is not None and experts.router.score == "softmax"
    if second:
        check_heads(config, attention.num_heads)
    data = write_sizes(config) | write_latent(attention)
    data |= {
        "architectures": ["DeepseekV2ForCausalLM" if second else "DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v2" if second else "deepseek_v3",
        "rope_interleave": attention.rope.pairing == "interleaved",
        "hidden_act": activation_name(stack),
        "intermediate_size": (dense_of(stack) or narrow(Experts, experts).expert).width,  # without dense ones: unused
        "first_k_dense_replace": sum(isinstance(layer.feed_forward, FeedForward) for layer in stack.layers),
    }
    return said_whole(data | (write_experts(experts, second) if experts else {}), config, read)


def write_latent(attention: LatentAttention) -> dict[str, Any]:
    rope = write_rope(attention.rope)
    if attention.scale is not None:
        rope["mscale_all_dim"] = recovered_mscale(attention)
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


def recovered_mscale(attention: LatentAttention) -> float:
    """The `mscale_all_dim` that gives this scale to the last bit, the shortest decimal there is."""
    width, scaling, scale = attention.plain_width + attention.rotary_width, attention.rope.scaling, attention.scale
    if scale is not None and scale > 0 and scaling is not None and scaling.factor > 1:
        for mscale in near_mscales(math.sqrt(scale * math.sqrt(width)), scaling.factor):
            if score_scale(width, scaling.factor, mscale) == scale:
                return mscale
    raise ClearheadError(f"DeepSeek models scale scores by their width and YaRN's magnitude alone, not by {scale}")


def near_mscales(magnitude: float, factor: float) -> Iterator[float]:
    """yarn_magnitude solved for mscale: rounded to ever more digits, then a few last bits up and down."""
    unit = 0.1 * math.log(factor)
    yield from (round((magnitude - 1) / unit, digits) for digits in range(1, 16))
    for step, last in product(range(-4, 5), repeat=2):
        mscale = (magnitude + step * math.ulp(magnitude) - 1) / unit
        yield mscale + last * math.ulp(mscale)


def write_experts(experts: Experts, second: bool) -> dict[str, Any]:
    groups, shared = experts.router.groups, narrow(FeedForward, experts.shared)
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
    return data | ({"topk_method": "group_limited_greedy" if groups else "greedy"} if second else {})


NAMES: Table = {
    **llama.NAMES,
    **MIXTURE_NAMES,
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
DROPPED = (
    *llama.DROPPED,
    rf"model\.layers\.{AFTER_LAST}\..*",  # of V3: it predicts the token after next, for training and drafts
)

FAMILY = Family(
    name="deepseek",
    presets=PRESETS,
    model_types=("deepseek_v2", "deepseek_v3"),
    read=read,
    write=write,
    names=NAMES,
    prefix="model.",
    copies=llama.COPIES,
    dropped=DROPPED,
)
