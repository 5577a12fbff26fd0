"""T5 and T5 v1.1: an encoder-decoder that knows positions only as buckets of distance, and has no biases.

Scores are not scaled and heads may be wider or narrower than width / num_heads. v1.0: ReLU, head tied to the table
and scaled by width^-0.5. v1.1: GeGLU (the tanh form), a head of its own.
Sources: Raffel et al. 2020, §2.1 and §3.7; models/t5.1.1.*.gin and the config.json of each release.
"""

from collections.abc import Callable
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
from clearhead.families.family import Family, narrow, said_whole
from clearhead.families.names import LAYER, Copy, Row, Table
from clearhead.families.settings import ACTIVATION_NAMES_BACK, Settings

CONTEXT = 512  # tokens of a training sequence; buckets set no limit


def t5(
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
) -> ModelConfig:
    across = GroupedAttention(
        num_heads=num_heads, num_kv_heads=num_heads, head_width=head_width, pattern=Bidirectional(), scale=1.0
    )
    both_ways = RelativeBuckets(num_buckets=num_buckets, max_distance=max_distance, bidirectional=True)
    norm, embedding = RmsNorm(epsilon=epsilon), Embedding(vocab_size=vocab_size)
    encoding = Layer(attention=replace(across, position=both_ways), feed_forward=feed_forward, norm=norm)
    decoding = Layer(
        attention=replace(across, position=replace(both_ways, bidirectional=False), pattern=Causal()),
        cross_attention=across,
        feed_forward=feed_forward,
        norm=norm,
    )
    return ModelConfig(
        width=width,
        context=context,
        encoder=Stack(embedding=embedding, layers=(encoding,) * num_layers, final_norm=norm),
        decoder=Stack(embedding=embedding, layers=(decoding,) * (num_decoder_layers or num_layers), final_norm=norm),
        head=head,
        share_embeddings=True,
    )


def t5_first(
    width: int, num_layers: int, num_heads: int, feed_forward: int, head_width: int = 64
) -> Callable[[], ModelConfig]:
    return lambda: t5(
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        head_width=head_width,
        feed_forward=FeedForward(width=feed_forward, activation="relu"),
        head=Head(scale=width**-0.5),
    )


def t5_v1_1(width: int, num_layers: int, num_heads: int, feed_forward: int) -> Callable[[], ModelConfig]:
    return lambda: t5(
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        feed_forward=FeedForward(width=feed_forward, activation="gelu_tanh", gated=True),
        head=Head(tied=False),
    )


PRESETS = {
    "t5-small": t5_first(512, 6, 8, 2048),
    "t5-base": t5_first(768, 12, 12, 3072),
    "t5-large": t5_first(1024, 24, 16, 4096),
    "t5-3b": t5_first(1024, 24, 32, 16384, head_width=128),
    "t5-11b": t5_first(1024, 24, 128, 65536, head_width=128),
    "t5-v1.1-small": t5_v1_1(512, 8, 6, 1024),
    "t5-v1.1-base": t5_v1_1(768, 12, 12, 2048),
    "t5-v1.1-large": t5_v1_1(1024, 24, 16, 2816),
    "t5-v1.1-xl": t5_v1_1(2048, 24, 32, 5120),
    "t5-v1.1-xxl": t5_v1_1(4096, 24, 64, 10240),
}


# --- transformers' words


def read(settings: Settings) -> ModelConfig:
    settings.refuse("is_encoder_decoder", True)
    settings.refuse("is_decoder", False)
    width = settings.whole("d_model", at_least=1)
    num_layers = settings.whole("num_layers", at_least=1)
    tied = settings.flag("tie_word_embeddings", True)
    scaled = settings.flag("scale_decoder_outputs", tied)
    return t5(
        width=width,
        num_layers=num_layers,
        num_decoder_layers=settings.whole("num_decoder_layers", num_layers, at_least=1),
        num_heads=settings.whole("num_heads"),
        head_width=settings.whole("d_kv"),
        feed_forward=read_feed_forward(settings),
        head=Head(tied=tied, scale=width**-0.5 if scaled else 1.0),
        vocab_size=settings.whole("vocab_size"),
        context=settings.whole("n_positions", CONTEXT),
        num_buckets=settings.whole("relative_attention_num_buckets", 32),
        max_distance=settings.whole("relative_attention_max_distance", 128),
        epsilon=settings.number("layer_norm_epsilon", 1e-6),
    )


def read_feed_forward(settings: Settings) -> FeedForward:
    """`feed_forward_proj` is "relu", "gated-silu", …; "gated-gelu" means the tanh form if `dense_act_fn` is silent."""
    projection = settings.text("feed_forward_proj", "relu")
    gated, name = projection.startswith("gated-"), projection.removeprefix("gated-")
    settings.refuse("is_gated_act", gated)
    activation = settings.activation("dense_act_fn", "gelu_new" if projection == "gated-gelu" else name)
    return FeedForward(width=settings.whole("d_ff"), activation=activation, gated=gated)


def settle(config: ModelConfig, tensor_names: set[str]) -> ModelConfig:
    """transformers writes `tie_word_embeddings: true` even for v1.1: its head is untied where it has a tensor.

    v1.0, known by its scale, is always tied; a `lm_head.weight` there is a copy.
    """
    assert config.head is not None
    if config.head.scale != 1.0:
        return config
    return replace(config, head=replace(config.head, tied="lm_head.weight" not in tensor_names))


def write(config: ModelConfig) -> dict[str, Any]:
    encoder, decoder, head = narrow(Stack, config.encoder), narrow(Stack, config.decoder), narrow(Head, config.head)
    layer = encoder.layers[0]
    attention, inner = narrow(GroupedAttention, layer.attention), narrow(FeedForward, layer.feed_forward)
    buckets = narrow(RelativeBuckets, attention.position)
    activation = "gelu_new" if inner.activation == "gelu_tanh" else ACTIVATION_NAMES_BACK[inner.activation]
    projection = f"gated-{activation.removesuffix('_new')}" if inner.gated else activation
    data = {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "d_model": config.width,
        "num_layers": len(encoder.layers),
        "num_decoder_layers": len(decoder.layers),
        "num_heads": attention.num_heads,
        "d_kv": attention.head_width,
        "d_ff": inner.width,
        "feed_forward_proj": projection,
        "dense_act_fn": activation,
        "is_gated_act": inner.gated,
        "vocab_size": config.vocab_size,
        "n_positions": config.context,
        "relative_attention_num_buckets": buckets.num_buckets,
        "relative_attention_max_distance": buckets.max_distance,
        "layer_norm_epsilon": narrow(RmsNorm, layer.norm).epsilon,
        "tie_word_embeddings": head.tied,
        "scale_decoder_outputs": head.scale != 1.0,
    }
    return said_whole(data, config, read)


def attention_names(theirs: str, ours: str) -> dict[str, str | Row]:
    words = {"q": "query", "k": "key", "v": "value", "o": "output"}
    return {f"{theirs}.{letter}.weight": f"{ours}.{word}.weight" for letter, word in words.items()}


def stack_names(stack: str, last_branch: int) -> dict[str, str | Row]:
    theirs, ours = f"{stack}.block.{{layer}}.layer", f"{stack}.layers.{{layer}}"
    inner, gate, up = f"{theirs}.{last_branch}.DenseReluDense", f"{ours}.feed_forward.gate", f"{ours}.feed_forward.up"
    return {
        f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight": f"{stack}.relative_bias.weight",
        **attention_names(f"{theirs}.0.SelfAttention", f"{ours}.attention"),
        f"{theirs}.0.layer_norm.weight": f"{ours}.attention_residual.norm.weight",
        f"{inner}.wi.weight": Copy((f"{up}.weight",), without=f"{gate}.weight"),
        f"{inner}.wi_0.weight": f"{gate}.weight",
        f"{inner}.wi_1.weight": Copy((f"{up}.weight",), beside=f"{gate}.weight"),
        f"{inner}.wo.weight": f"{ours}.feed_forward.down.weight",
        f"{theirs}.{last_branch}.layer_norm.weight": f"{ours}.feed_forward_residual.norm.weight",
        f"{stack}.final_layer_norm.weight": f"{stack}.final_norm.weight",
    }


CROSS = "decoder.block.{layer}.layer.1"
NAMES: Table = {
    "shared.weight": "encoder.embedding.tokens.weight",
    **stack_names("encoder", last_branch=1),
    **stack_names("decoder", last_branch=2),
    **attention_names(f"{CROSS}.EncDecAttention", f"{LAYER}.cross_attention"),
    f"{CROSS}.layer_norm.weight": f"{LAYER}.cross_attention_residual.norm.weight",
    "lm_head.weight": "head.weight",
}
COPIES = {
    "encoder.embed_tokens.weight": "shared.weight",
    "decoder.embed_tokens.weight": "shared.weight",
    "lm_head.weight": "shared.weight",
}
# Early releases hold a table for cross-attention that was never used.
DROPPED = (r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",)

FAMILY = Family(
    name="t5",
    presets=PRESETS,
    model_types=("t5",),
    read=read,
    write=write,
    names=NAMES,
    copies=COPIES,
    dropped=DROPPED,
    settle=settle,
)
