"""MPT: ALiBi instead of positions, LayerNorm by weight alone, no bias anywhere (MosaicML 2023).

Sources: MosaicML's release notes and the config.json of each size. Where transformers' class passes over a setting
(it always computes `alibi_bias_max` 8), the setting is followed here, as in MosaicML's own code.
"""

from typing import Any

from clearhead.architecture import Alibi, Embedding, FeedForward, Head, LayerNorm, ModelConfig, Stack
from clearhead.families.family import Family, said_whole
from clearhead.families.names import LAYER, QKV_WEIGHTS, Fused, Table
from clearhead.families.plain import multi_head, plain_layers, plain_parts
from clearhead.families.settings import Settings


def mpt(
    *,
    width: int,
    num_layers: int,
    num_heads: int,
    context: int,
    vocab_size: int = 50432,
    clip: float | None = None,
    scale: float | None = None,
    max_bias: float = 8.0,
    epsilon: float = 1e-5,
    tied: bool = True,
) -> ModelConfig:
    norm = LayerNorm(epsilon=epsilon, bias=False)
    attention = multi_head(
        width,
        num_heads,
        input_bias=False,
        output_bias=False,
        position=Alibi(max_bias=max_bias),
        clip=clip,
        scale=scale,
    )
    inner = FeedForward(width=4 * width, activation="gelu")
    stack = Stack(
        embedding=Embedding(vocab_size=vocab_size),
        layers=plain_layers([attention] * num_layers, inner, norm),
        final_norm=norm,
    )
    return ModelConfig(width=width, context=context, decoder=stack, head=Head(tied=tied))


def mpt_7b() -> ModelConfig:
    return mpt(width=4096, num_layers=32, num_heads=32, context=2048)


def mpt_7b_storywriter() -> ModelConfig:
    return mpt(width=4096, num_layers=32, num_heads=32, context=65536, clip=6.0, max_bias=16.0)


def mpt_30b() -> ModelConfig:
    return mpt(width=7168, num_layers=48, num_heads=64, context=8192)


PRESETS = {"mpt-7b": mpt_7b, "mpt-7b-storywriter": mpt_7b_storywriter, "mpt-30b": mpt_30b}


# --- transformers' words


def read(settings: Settings) -> ModelConfig:
    """`learned_pos_emb` is void beside ALiBi; `embedding_fraction` matters in training only."""
    settings.refuse("norm_type", "low_precision_layernorm", "layernorm")
    settings.refuse("no_bias", True)
    settings.refuse("expansion_ratio", 4)
    settings.refuse("logit_scale")
    attention = settings.table("attn_config")
    attention.refuse("alibi", True)
    attention.refuse("attn_type", "multihead_attention")
    attention.refuse("sliding_window_size", -1)
    for name in ("qk_ln", "prefix_lm", "attn_uses_sequence_id", "rope"):
        attention.refuse(name, False)
    return mpt(
        width=settings.whole("d_model"),
        num_layers=settings.whole("n_layers"),
        num_heads=settings.whole("n_heads"),
        context=settings.whole("max_seq_len"),
        vocab_size=settings.whole("vocab_size"),
        clip=attention.number("clip_qkv", 0.0) or None,
        scale=attention.number("softmax_scale") if "softmax_scale" in attention else None,
        max_bias=attention.number("alibi_bias_max", 8.0),
        epsilon=settings.number("layer_norm_epsilon", 1e-5),
        tied=settings.flag("tie_word_embeddings", True),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    parts = plain_parts(config.decoder)
    attention = parts.attentions[0]
    max_bias = attention.position.max_bias if isinstance(attention.position, Alibi) else 8.0
    data = {
        "architectures": ["MptForCausalLM"],
        "model_type": "mpt",
        "d_model": config.width,
        "n_layers": len(parts.stack.layers),
        "n_heads": attention.num_heads,
        "max_seq_len": config.context,
        "vocab_size": config.vocab_size,
        "layer_norm_epsilon": parts.norm.epsilon,
        "tie_word_embeddings": config.head is not None and config.head.tied,
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": int(max_bias),
            "clip_qkv": attention.clip,
            "softmax_scale": attention.scale,
        },
    }
    return said_whole(data, config, read)


NAMES: Table = {
    "transformer.wte.weight": "decoder.embedding.tokens.weight",
    "transformer.blocks.{layer}.attn.Wqkv.weight": Fused(QKV_WEIGHTS),
    "transformer.blocks.{layer}.attn.out_proj.weight": f"{LAYER}.attention.output.weight",
    "transformer.blocks.{layer}.ffn.up_proj.weight": f"{LAYER}.feed_forward.up.weight",
    "transformer.blocks.{layer}.ffn.down_proj.weight": f"{LAYER}.feed_forward.down.weight",
    "transformer.blocks.{layer}.norm_1.weight": f"{LAYER}.attention_residual.norm.weight",
    "transformer.blocks.{layer}.norm_2.weight": f"{LAYER}.feed_forward_residual.norm.weight",
    "transformer.norm_f.weight": "decoder.final_norm.weight",
    "lm_head.weight": "head.weight",
}

FAMILY = Family(
    name="mpt",
    presets=PRESETS,
    model_types=("mpt",),
    read=read,
    write=write,
    names=NAMES,
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.wte.weight"},
)
