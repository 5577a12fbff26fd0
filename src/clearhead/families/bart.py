"""BART, Marian (OPUS-MT) and Pegasus: the Transformer of 2017 with biases throughout, each with its own ornaments.

             positions             norm of embeddings   norms   last norm
    bart     learned               yes                  post    no
    marian   sines, then cosines   no                   post    no
    pegasus  sines, then cosines   no                   pre     yes

One token table serves source, target and head; a bias is added to the logits.
Sources: Lewis et al. 2020, §2.1; Junczys-Dowmunt et al. 2018; Zhang et al. 2020, §6.1; the config.json of each release.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from clearhead.architecture import (
    Activation,
    Bidirectional,
    Causal,
    Embedding,
    FeedForward,
    Head,
    Layer,
    LayerNorm,
    LearnedPositions,
    ModelConfig,
    SinusoidalPositions,
    Stack,
)
from clearhead.families.family import Family, narrow, said_whole
from clearhead.families.names import Copy, SingleRow, Table
from clearhead.families.plain import multi_head
from clearhead.families.settings import ACTIVATION_NAMES_BACK, Settings

Kind = Literal["bart", "marian", "pegasus"]
NORM = LayerNorm(epsilon=1e-5)  # PyTorch's default; config.json has no word for it


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of one stack."""

    num_layers: int
    num_heads: int
    feed_forward: int


def bart(
    kind: Kind,
    *,
    width: int,
    encoder: Size,
    decoder: Size,
    vocab_size: int,
    context: int,
    activation: Activation,
    scaled: bool,
    target_vocab_size: int | None = None,
    logit_bias: bool = True,
) -> ModelConfig:
    """`scaled`: embeddings times √width. `target_vocab_size`: source and target have a table each; None: one."""
    embedding = Embedding(
        vocab_size=vocab_size,
        scale=math.sqrt(width) if scaled else 1.0,
        positions=SinusoidalPositions(layout="halves"),
    )
    if kind == "bart":
        embedding = replace(embedding, positions=LearnedPositions(num_positions=context, offset=2), norm=NORM)
    final_norm = NORM if kind == "pegasus" else None

    def layer(size: Size, *, decodes: bool) -> Layer:
        attention = multi_head(width, size.num_heads, pattern=Bidirectional())
        return Layer(
            attention=replace(attention, pattern=Causal()) if decodes else attention,
            cross_attention=attention if decodes else None,
            feed_forward=FeedForward(width=size.feed_forward, activation=activation, bias=True),
            norm=NORM,
            placement="pre" if kind == "pegasus" else "post",
        )

    return ModelConfig(
        width=width,
        context=context,
        encoder=Stack(
            embedding=embedding,
            layers=(layer(encoder, decodes=False),) * encoder.num_layers,
            final_norm=final_norm,
        ),
        decoder=Stack(
            embedding=replace(embedding, vocab_size=target_vocab_size or vocab_size),
            layers=(layer(decoder, decodes=True),) * decoder.num_layers,
            final_norm=final_norm,
        ),
        head=Head(bias=logit_bias),
        share_embeddings=target_vocab_size is None,
    )


def released(
    kind: Kind, width: int, num_layers: int, num_heads: int, *, vocab_size: int, context: int, activation: Activation
) -> Callable[[], ModelConfig]:
    size = Size(num_layers=num_layers, num_heads=num_heads, feed_forward=4 * width)
    return lambda: bart(
        kind,
        width=width,
        encoder=size,
        decoder=size,
        vocab_size=vocab_size,
        context=context,
        activation=activation,
        scaled=kind != "bart",
    )


PRESETS = {
    "bart-base": released("bart", 768, 6, 12, vocab_size=50265, context=1024, activation="gelu"),
    "bart-large": released("bart", 1024, 12, 16, vocab_size=50265, context=1024, activation="gelu"),
    # opus-mt-en-de; the vocabulary differs from pair to pair
    "marian": released("marian", 512, 6, 8, vocab_size=58101, context=512, activation="silu"),
    "pegasus-large": released("pegasus", 1024, 16, 16, vocab_size=96103, context=1024, activation="relu"),
}


# --- transformers' words

# What older files say of the ornaments, and transformers takes from the model_type alone.
SAID_BY_TYPE: dict[Kind, dict[str, bool]] = {
    "bart": {"normalize_before": False, "normalize_embedding": True, "static_position_embeddings": False},
    "marian": {"normalize_before": False, "normalize_embedding": False, "static_position_embeddings": True},
    "pegasus": {"normalize_before": True, "normalize_embedding": False, "static_position_embeddings": True},
}


def read(settings: Settings) -> ModelConfig:
    kind = cast(Kind, settings.text("model_type"))
    for name, value in SAID_BY_TYPE[kind].items():
        settings.refuse(name, value)
    settings.refuse("add_final_layer_norm", kind == "pegasus")
    settings.refuse("is_encoder_decoder", True)
    settings.refuse("is_decoder", False)
    settings.refuse("tie_word_embeddings", True)
    vocab_size = settings.whole("vocab_size")
    shared = kind != "marian" or settings.flag("share_encoder_decoder_embeddings", True)
    if shared:
        settings.refuse("decoder_vocab_size", vocab_size)
    return bart(
        kind,
        width=settings.whole("d_model"),
        encoder=read_size(settings, "encoder"),
        decoder=read_size(settings, "decoder"),
        vocab_size=vocab_size,
        target_vocab_size=None if shared else settings.whole("decoder_vocab_size", vocab_size),
        context=settings.whole("max_position_embeddings"),
        activation=settings.activation("activation_function", "gelu"),
        scaled=settings.flag("scale_embedding", False),
        logit_bias=settings.flag("final_logits_bias", True),
    )


def read_size(settings: Settings, stack: str) -> Size:
    return Size(
        num_layers=settings.whole(f"{stack}_layers"),
        num_heads=settings.whole(f"{stack}_attention_heads"),
        feed_forward=settings.whole(f"{stack}_ffn_dim"),
    )


def settle(config: ModelConfig, tensor_names: set[str]) -> ModelConfig:
    """Checkpoints of the bare model (bart-large) have no logit bias."""
    assert config.head is not None
    return replace(config, head=replace(config.head, bias="final_logits_bias" in tensor_names))


def write(config: ModelConfig) -> dict[str, Any]:
    encoder, decoder, head = narrow(Stack, config.encoder), narrow(Stack, config.decoder), narrow(Head, config.head)
    kind = "pegasus" if encoder.final_norm else "bart" if encoder.embedding.norm else "marian"
    names = {
        "bart": "BartForConditionalGeneration",
        "marian": "MarianMTModel",
        "pegasus": "PegasusForConditionalGeneration",
    }
    data = {
        "architectures": [names[kind]],
        "model_type": kind,
        "is_encoder_decoder": True,
        "d_model": config.width,
        "vocab_size": encoder.embedding.vocab_size,
        "max_position_embeddings": config.context,
        **write_size(encoder, "encoder"),
        **write_size(decoder, "decoder"),
        "activation_function": ACTIVATION_NAMES_BACK[narrow(FeedForward, encoder.layers[0].feed_forward).activation],
        "scale_embedding": encoder.embedding.scale != 1.0,
        "tie_word_embeddings": head.tied,
    }
    if not config.share_embeddings:
        data |= {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": decoder.embedding.vocab_size}
    if not head.bias:
        data |= {"final_logits_bias": False}  # our own word; transformers fills in zeros
    return said_whole(data, config, read)


def write_size(stack: Stack, name: str) -> dict[str, int]:
    return {
        f"{name}_layers": len(stack.layers),
        f"{name}_attention_heads": stack.layers[0].attention.num_heads,
        f"{name}_ffn_dim": narrow(FeedForward, stack.layers[0].feed_forward).width,
    }


LAYER_PARTS = {
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.out_proj": "attention.output",
    "self_attn_layer_norm": "attention_residual.norm",
    "encoder_attn.q_proj": "cross_attention.query",
    "encoder_attn.k_proj": "cross_attention.key",
    "encoder_attn.v_proj": "cross_attention.value",
    "encoder_attn.out_proj": "cross_attention.output",
    "encoder_attn_layer_norm": "cross_attention_residual.norm",
    "fc1": "feed_forward.up",
    "fc2": "feed_forward.down",
    "final_layer_norm": "feed_forward_residual.norm",  # of the layer
}
STACK_PARTS = {
    "embed_positions": "embedding.positions",
    "layernorm_embedding": "embedding.norm",
    "layer_norm": "final_norm",
    **{f"layers.{{layer}}.{theirs}": f"layers.{{layer}}.{ours}" for theirs, ours in LAYER_PARTS.items()},
}
SOURCE, TARGET = "encoder.embedding.tokens.weight", "decoder.embedding.tokens.weight"
NAMES: Table = {
    "model.shared.weight": Copy((SOURCE,), without=TARGET),
    "model.encoder.embed_tokens.weight": Copy((SOURCE,), beside=TARGET),
    "model.decoder.embed_tokens.weight": TARGET,
    **{
        f"model.{stack}.{theirs}.{leaf}": f"{stack}.{ours}.{leaf}"
        for stack in ("encoder", "decoder")
        for theirs, ours in STACK_PARTS.items()
        for leaf in ("weight", "bias")
    },
    "final_logits_bias": SingleRow(("head.bias",)),
}
COPIES = {
    "lm_head.weight": "model.shared.weight",
    "model.encoder.embed_tokens.weight": "model.shared.weight",
    "model.decoder.embed_tokens.weight": "model.shared.weight",
}
DROPPED = (
    r"model\.(encoder|decoder)\.embed_positions\.weight",  # where they are sinusoids: recomputed
    r"model\.(encoder|decoder)\.version",  # number of fairseq's file format
)

FAMILY = Family(
    name="bart",
    presets=PRESETS,
    model_types=("bart", "marian", "pegasus"),
    read=read,
    write=write,
    names=NAMES,
    prefix="model.",
    copies=COPIES,
    dropped=DROPPED,
    settle=settle,
)
