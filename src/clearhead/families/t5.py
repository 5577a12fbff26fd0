"""T5, T5 v1.1, mT5 and UMT5: an encoder-decoder with relative-position buckets and without biases.

Scores are not scaled, and heads may be wider or narrower than width / num_heads. v1.0 has ReLU and a tied head scaled
by width^-0.5; v1.1 has GeGLU (the tanh form) and an untied head. mT5 is v1.1 with a larger vocabulary, and in UMT5
every layer has its own table of buckets. A T5EncoderModel is the encoder alone.
Sources: Raffel et al. 2020, §2.1 and §3.7; models/t5.1.1.*.gin and the config.json of each release.
"""

from dataclasses import replace
from typing import Any

from clearhead.architecture import (
    Bidirectional,
    Causal,
    Embedding,
    FeedForward,
    GroupedAttention,
    Head,
    Layer,
    ModelConfig,
    RelativeBuckets,
    RmsNorm,
    Stack,
)
from clearhead.families.family import Family, Preset, require_round_trip, require_type
from clearhead.families.settings import NAMES_BY_ACTIVATION, Settings
from clearhead.families.tensor_rules import LAYER, Copy, NameTable, TensorRule

_FULL_CLASS, _ENCODER_CLASS = "ForConditionalGeneration", "EncoderModel"
CONTEXT = 512  # length of the training sequences; relative buckets impose no limit


def t5_config(
    *,
    width: int,
    num_layers: int,
    num_heads: int,
    feed_forward: FeedForward,
    head: Head,
    head_width: int = 64,
    num_decoder_layers: int | None = None,
    vocab_size: int = 32128,
    context: int = CONTEXT,
    num_buckets: int = 32,
    max_distance: int = 128,
    epsilon: float = 1e-6,
    per_layer: bool = False,
) -> ModelConfig:
    """Return an encoder-decoder; `num_decoder_layers` None means as many as the encoder has."""
    cross_attention = GroupedAttention(
        num_heads=num_heads, num_kv_heads=num_heads, head_width=head_width, pattern=Bidirectional(), scale=1.0
    )
    buckets = RelativeBuckets(
        num_buckets=num_buckets, max_distance=max_distance, bidirectional=True, per_layer=per_layer
    )
    norm, embedding = RmsNorm(epsilon=epsilon), Embedding(vocab_size=vocab_size)
    encoder_layer = Layer(attention=replace(cross_attention, position=buckets), feed_forward=feed_forward, norm=norm)
    decoder_layer = Layer(
        attention=replace(cross_attention, position=replace(buckets, bidirectional=False), pattern=Causal()),
        cross_attention=cross_attention,
        feed_forward=feed_forward,
        norm=norm,
    )
    return ModelConfig(
        width=width,
        context=context,
        encoder=Stack(embedding=embedding, layers=(encoder_layer,) * num_layers, final_norm=norm),
        decoder=Stack(
            embedding=embedding, layers=(decoder_layer,) * (num_decoder_layers or num_layers), final_norm=norm
        ),
        head=head,
        share_embeddings=True,
    )


def _t5_v1_0_preset(width: int, num_layers: int, num_heads: int, feed_forward: int, head_width: int = 64) -> Preset:
    return lambda: t5_config(
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        head_width=head_width,
        feed_forward=FeedForward(width=feed_forward, activation="relu"),
        head=Head(scale=width**-0.5),
    )


def _t5_v1_1_preset(
    width: int,
    num_layers: int,
    num_heads: int,
    feed_forward: int,
    vocab_size: int = 32128,
    per_layer: bool = False,
) -> Preset:
    return lambda: t5_config(
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        feed_forward=FeedForward(width=feed_forward, activation="gelu_tanh", gated=True),
        head=Head(tied=False, scale=width**-0.5 if per_layer else 1.0),
        vocab_size=vocab_size,
        per_layer=per_layer,
    )


PRESETS = {
    "t5-small": _t5_v1_0_preset(512, 6, 8, 2048),
    "t5-base": _t5_v1_0_preset(768, 12, 12, 3072),
    "t5-large": _t5_v1_0_preset(1024, 24, 16, 4096),
    "t5-3b": _t5_v1_0_preset(1024, 24, 32, 16384, head_width=128),
    "t5-11b": _t5_v1_0_preset(1024, 24, 128, 65536, head_width=128),
    "t5-v1.1-small": _t5_v1_1_preset(512, 8, 6, 1024),
    "t5-v1.1-base": _t5_v1_1_preset(768, 12, 12, 2048),
    "t5-v1.1-large": _t5_v1_1_preset(1024, 24, 16, 2816),
    "t5-v1.1-xl": _t5_v1_1_preset(2048, 24, 32, 5120),
    "t5-v1.1-xxl": _t5_v1_1_preset(4096, 24, 64, 10240),
    "mt5-small": _t5_v1_1_preset(512, 8, 6, 1024, 250112),
    "mt5-base": _t5_v1_1_preset(768, 12, 12, 2048, 250112),
    "umt5-small": _t5_v1_1_preset(512, 8, 6, 1024, 256384, per_layer=True),
}


# --- config.json


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes."""
    model_type = settings.string("model_type", "t5")
    is_encoder = any(str(name).endswith(_ENCODER_CLASS) for name in settings.array("architectures"))
    if not is_encoder:
        settings.allow_only("is_encoder_decoder", True)
    settings.allow_only("is_decoder", False)
    width = settings.integer("d_model", at_least=1)
    num_layers = settings.integer("num_layers", at_least=1)
    tied = settings.boolean("tie_word_embeddings", True)
    # UMT5's class scales them always, the classes of T5 and mT5 as the settings say.
    scaled = model_type == "umt5" or settings.truth("scale_decoder_outputs", tied and model_type != "mt5")
    config = t5_config(
        width=width,
        num_layers=num_layers,
        num_decoder_layers=settings.integer("num_decoder_layers", num_layers, at_least=1),
        num_heads=settings.integer("num_heads"),
        head_width=settings.integer("d_kv"),
        feed_forward=_read_feed_forward(settings, "relu" if model_type == "t5" else "gated-gelu"),
        head=Head(tied=tied, scale=width**-0.5 if scaled else 1.0),
        vocab_size=settings.integer("vocab_size"),
        context=settings.integer("n_positions", CONTEXT),
        num_buckets=settings.integer("relative_attention_num_buckets", 32),
        max_distance=settings.integer("relative_attention_max_distance", 128),
        epsilon=settings.number("layer_norm_epsilon", 1e-6),
        per_layer=model_type == "umt5",
    )
    return replace(config, decoder=None, head=None, share_embeddings=False) if is_encoder else config


def _read_feed_forward(settings: Settings, default: str) -> FeedForward:
    """Return the feed-forward that `feed_forward_proj` names, such as "relu" or "gated-silu".

    "gated-gelu" means the tanh form unless `dense_act_fn` is present.
    """
    projection = settings.string("feed_forward_proj", default)
    gated, name = projection.startswith("gated-"), projection.removeprefix("gated-")
    settings.allow_only("is_gated_act", gated)
    activation = settings.activation("dense_act_fn", "gelu_new" if projection == "gated-gelu" else name)
    return FeedForward(width=settings.integer("d_ff"), activation=activation, gated=gated)


def adjust_config(config: ModelConfig, tensor_names: set[str]) -> ModelConfig:
    """Untie the head of a v1.1 or UMT5 checkpoint that holds `lm_head.weight`.

    transformers writes `tie_word_embeddings: true` even for v1.1. v1.0, recognized by the scale of its head, is always
    tied; a `lm_head.weight` there is a copy.
    """
    attention = config.output_stack.layers[0].attention
    position = attention.position if isinstance(attention, GroupedAttention) else None
    is_umt5 = isinstance(position, RelativeBuckets) and position.per_layer
    if config.head is None or (config.head.scale != 1.0 and not is_umt5):
        return config
    return replace(config, head=replace(config.head, tied="lm_head.weight" not in tensor_names))


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    encoder, decoder = require_type(Stack, config.encoder), config.decoder or config.output_stack
    head, layer = config.head or Head(), encoder.layers[0]
    attention, dense = require_type(GroupedAttention, layer.attention), require_type(FeedForward, layer.feed_forward)
    buckets = require_type(RelativeBuckets, attention.position)
    activation = "gelu_new" if dense.activation == "gelu_tanh" else NAMES_BY_ACTIVATION[dense.activation]
    projection = f"gated-{activation.removesuffix('_new')}" if dense.gated else activation
    model_type = "umt5" if buckets.per_layer else "t5"
    data = {
        "architectures": [model_type.upper() + (_ENCODER_CLASS if config.decoder is None else _FULL_CLASS)],
        "model_type": model_type,
        "is_encoder_decoder": config.decoder is not None,
        "d_model": config.width,
        "num_layers": len(encoder.layers),
        "num_decoder_layers": len(decoder.layers),
        "num_heads": attention.num_heads,
        "d_kv": attention.head_width,
        "d_ff": dense.width,
        "feed_forward_proj": projection,
        "dense_act_fn": activation,
        "is_gated_act": dense.gated,
        "vocab_size": config.vocab_size,
        "n_positions": config.context,
        "relative_attention_num_buckets": buckets.num_buckets,
        "relative_attention_max_distance": buckets.max_distance,
        "layer_norm_epsilon": require_type(RmsNorm, layer.norm).epsilon,
        "tie_word_embeddings": head.tied,
        "scale_decoder_outputs": head.scale != 1.0,
    }
    if config.decoder is None:  # the settings of what is not there have the values that reading takes for granted
        data |= {"tie_word_embeddings": True, "scale_decoder_outputs": True}
    return require_round_trip(data, config, read_config)


# --- tensor names


def _attention_names(theirs: str, ours: str) -> dict[str, str | TensorRule]:
    projections = {"q": "query", "k": "key", "v": "value", "o": "output"}
    return {f"{theirs}.{letter}.weight": f"{ours}.{name}.weight" for letter, name in projections.items()}


def _stack_names(stack: str, feed_forward_index: int) -> dict[str, str | TensorRule]:
    """Return the names of an encoder or a decoder; the index is that of the feed-forward among a layer's branches."""
    theirs, ours = f"{stack}.block.{{layer}}.layer", f"{stack}.layers.{{layer}}"
    dense = f"{theirs}.{feed_forward_index}.DenseReluDense"
    gate, up = f"{ours}.feed_forward.gate", f"{ours}.feed_forward.up"
    return {
        f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight": f"{stack}.relative_bias.weight",
        f"{theirs}.0.SelfAttention.relative_attention_bias.weight": f"{ours}.attention.relative_bias.weight",  # UMT5
        **_attention_names(f"{theirs}.0.SelfAttention", f"{ours}.attention"),
        f"{theirs}.0.layer_norm.weight": f"{ours}.attention_residual.norm.weight",
        f"{dense}.wi.weight": Copy((f"{up}.weight",), only_without=f"{gate}.weight"),
        f"{dense}.wi_0.weight": f"{gate}.weight",
        f"{dense}.wi_1.weight": Copy((f"{up}.weight",), only_with=f"{gate}.weight"),
        f"{dense}.wo.weight": f"{ours}.feed_forward.down.weight",
        f"{theirs}.{feed_forward_index}.layer_norm.weight": f"{ours}.feed_forward_residual.norm.weight",
        f"{stack}.final_layer_norm.weight": f"{stack}.final_norm.weight",
    }


_CROSS = "decoder.block.{layer}.layer.1"
NAMES: NameTable = {
    "shared.weight": "encoder.embedding.tokens.weight",
    **_stack_names("encoder", feed_forward_index=1),
    **_stack_names("decoder", feed_forward_index=2),
    **_attention_names(f"{_CROSS}.EncDecAttention", f"{LAYER}.cross_attention"),
    f"{_CROSS}.layer_norm.weight": f"{LAYER}.cross_attention_residual.norm.weight",
    "lm_head.weight": "head.weight",
}
DUPLICATES = {
    "encoder.embed_tokens.weight": "shared.weight",
    "decoder.embed_tokens.weight": "shared.weight",
    "lm_head.weight": "shared.weight",
}
# Early releases contain an unused table of relative positions for cross-attention.
IGNORED_TENSORS = (r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",)

FAMILY = Family(
    name="t5",
    presets=PRESETS,
    model_types=("t5", "mt5", "umt5"),
    read_config=read_config,
    write_config=write_config,
    tensor_names=NAMES,
    duplicates=DUPLICATES,
    ignored_tensors=IGNORED_TENSORS,
    adjust_config=adjust_config,
)
