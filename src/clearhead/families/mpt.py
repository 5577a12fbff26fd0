"""MPT: ALiBi, LayerNorm without bias, no bias anywhere (MosaicML 2023).

Sources: MosaicML's release notes and the config.json of each size. transformers' class ignores `alibi_bias_max` and
always uses 8; we follow the setting, as MosaicML's own code does.
"""

from typing import Any

from clearhead.architecture import Alibi, Embedding, FeedForward, Head, LayerNorm, ModelConfig, Stack
from clearhead.families.family import Family, require_round_trip
from clearhead.families.gpt_style import TOKEN_CLASSIFIER_NAMES, make_layers, multi_head_attention, stack_parts
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import LAYER, QKV_WEIGHTS, Fused, NameTable


def _mpt_config(
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
    """Return a config; `clip` limits queries, keys and values, `scale` None means head_width^-1/2."""
    norm = LayerNorm(epsilon=epsilon, bias=False)
    attention = multi_head_attention(
        width,
        num_heads,
        input_bias=False,
        output_bias=False,
        position=Alibi(max_bias=max_bias),
        clip=clip,
        scale=scale,
    )
    dense = FeedForward(width=4 * width, activation="gelu")
    stack = Stack(
        embedding=Embedding(vocab_size=vocab_size),
        layers=make_layers([attention] * num_layers, dense, norm),
        final_norm=norm,
    )
    return ModelConfig(width=width, context=context, decoder=stack, head=Head(tied=tied))


def _mpt_7b_preset() -> ModelConfig:
    return _mpt_config(width=4096, num_layers=32, num_heads=32, context=2048)


def _mpt_7b_storywriter_preset() -> ModelConfig:
    return _mpt_config(width=4096, num_layers=32, num_heads=32, context=65536, clip=6.0, max_bias=16.0)


def _mpt_30b_preset() -> ModelConfig:
    return _mpt_config(width=7168, num_layers=48, num_heads=64, context=8192)


PRESETS = {"mpt-7b": _mpt_7b_preset, "mpt-7b-storywriter": _mpt_7b_storywriter_preset, "mpt-30b": _mpt_30b_preset}


# --- config.json


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes.

    `learned_pos_emb` has no effect with ALiBi; `embedding_fraction` matters in training only.
    """
    settings.allow_only("norm_type", "low_precision_layernorm", "layernorm")
    settings.allow_only("no_bias", True)
    settings.allow_only("expansion_ratio", 4)
    settings.allow_only("logit_scale")
    attention = settings.object("attn_config")
    attention.allow_only("alibi", True)
    attention.allow_only("attn_type", "multihead_attention")
    attention.allow_only("sliding_window_size", -1)
    for name in ("qk_ln", "prefix_lm", "attn_uses_sequence_id", "rope"):
        attention.allow_only(name, False)
    return _mpt_config(
        width=settings.integer("d_model"),
        num_layers=settings.integer("n_layers"),
        num_heads=settings.integer("n_heads"),
        context=settings.integer("max_seq_len"),
        vocab_size=settings.integer("vocab_size"),
        clip=attention.number("clip_qkv", 0.0) or None,
        scale=attention.number("softmax_scale") if "softmax_scale" in attention else None,
        max_bias=attention.number("alibi_bias_max", 8.0),
        epsilon=settings.number("layer_norm_epsilon", 1e-5),
        tied=settings.boolean("tie_word_embeddings", True),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    parts = stack_parts(config.decoder)
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
    return require_round_trip(data, config, read_config)


NAMES: NameTable = {
    "transformer.wte.weight": "decoder.embedding.tokens.weight",
    "transformer.blocks.{layer}.attn.Wqkv.weight": Fused(QKV_WEIGHTS),
    "transformer.blocks.{layer}.attn.out_proj.weight": f"{LAYER}.attention.output.weight",
    "transformer.blocks.{layer}.ffn.up_proj.weight": f"{LAYER}.feed_forward.up.weight",
    "transformer.blocks.{layer}.ffn.down_proj.weight": f"{LAYER}.feed_forward.down.weight",
    "transformer.blocks.{layer}.norm_1.weight": f"{LAYER}.attention_residual.norm.weight",
    "transformer.blocks.{layer}.norm_2.weight": f"{LAYER}.feed_forward_residual.norm.weight",
    "transformer.norm_f.weight": "decoder.final_norm.weight",
    "lm_head.weight": "head.weight",
    **TOKEN_CLASSIFIER_NAMES,
}

FAMILY = Family(
    name="mpt",
    presets=PRESETS,
    model_types=("mpt",),
    read_config=read_config,
    write_config=write_config,
    tensor_names=NAMES,
    base_model_prefix="transformer.",
    duplicates={"lm_head.weight": "transformer.wte.weight"},
)
