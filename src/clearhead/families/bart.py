"""BART, Marian (OPUS-MT) and Pegasus: the Transformer of 2017 with biases throughout, in three variants.

             positions             embedding norm   norm placement   final norm
    bart     learned               yes              post             no
    marian   sines, then cosines   no               post             no
    pegasus  sines, then cosines   no               pre              yes

Source, target and head share one token table; a bias is added to the logits.
Sources: Lewis et al. 2020, §2.1; Junczys-Dowmunt et al. 2018; Zhang et al. 2020, §6.1; the config.json of each release.
"""

import math
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
from clearhead.families.family import Family, Preset, require_round_trip, require_type
from clearhead.families.gpt_style import multi_head_attention
from clearhead.families.settings import NAMES_BY_ACTIVATION, Settings
from clearhead.families.tensor_rules import Copy, NameTable, SingleRow

ModelType = Literal["bart", "marian", "pegasus"]
NORM = LayerNorm(epsilon=1e-5)  # PyTorch's default; config.json has no setting for it


@dataclass(frozen=True, kw_only=True)
class StackSize:
    """The sizes of an encoder or a decoder."""

    num_layers: int
    num_heads: int
    feed_forward: int


def bart_config(
    model_type: ModelType,
    *,
    width: int,
    encoder: StackSize,
    decoder: StackSize,
    vocab_size: int,
    context: int,
    activation: Activation,
    scaled: bool,
    target_vocab_size: int | None = None,
    logit_bias: bool = True,
) -> ModelConfig:
    """Return the config of an encoder-decoder.

    `scaled` multiplies embeddings by √width. A `target_vocab_size` gives the target a token table of its own.
    """
    embedding = Embedding(
        vocab_size=vocab_size,
        scale=math.sqrt(width) if scaled else 1.0,
        positions=SinusoidalPositions(layout="halves"),
    )
    if model_type == "bart":
        embedding = replace(embedding, positions=LearnedPositions(num_positions=context, offset=2), norm=NORM)
    final_norm = NORM if model_type == "pegasus" else None

    def make_layer(size: StackSize, *, is_decoder: bool) -> Layer:
        attention = multi_head_attention(width, size.num_heads, pattern=Bidirectional())
        return Layer(
            attention=replace(attention, pattern=Causal()) if is_decoder else attention,
            cross_attention=attention if is_decoder else None,
            feed_forward=FeedForward(width=size.feed_forward, activation=activation, bias=True),
            norm=NORM,
            placement="pre" if model_type == "pegasus" else "post",
        )

    return ModelConfig(
        width=width,
        context=context,
        encoder=Stack(
            embedding=embedding,
            layers=(make_layer(encoder, is_decoder=False),) * encoder.num_layers,
            final_norm=final_norm,
        ),
        decoder=Stack(
            embedding=replace(embedding, vocab_size=target_vocab_size or vocab_size),
            layers=(make_layer(decoder, is_decoder=True),) * decoder.num_layers,
            final_norm=final_norm,
        ),
        head=Head(bias=logit_bias),
        share_embeddings=target_vocab_size is None,
    )


def _bart_preset(
    model_type: ModelType,
    width: int,
    num_layers: int,
    num_heads: int,
    *,
    vocab_size: int,
    context: int,
    activation: Activation,
) -> Preset:
    size = StackSize(num_layers=num_layers, num_heads=num_heads, feed_forward=4 * width)
    return lambda: bart_config(
        model_type,
        width=width,
        encoder=size,
        decoder=size,
        vocab_size=vocab_size,
        context=context,
        activation=activation,
        scaled=model_type != "bart",
    )


PRESETS = {
    "bart-base": _bart_preset("bart", 768, 6, 12, vocab_size=50265, context=1024, activation="gelu"),
    "bart-large": _bart_preset("bart", 1024, 12, 16, vocab_size=50265, context=1024, activation="gelu"),
    # opus-mt-en-de; the vocabulary differs from pair to pair
    "marian": _bart_preset("marian", 512, 6, 8, vocab_size=58101, context=512, activation="silu"),
    "pegasus-large": _bart_preset("pegasus", 1024, 16, 16, vocab_size=96103, context=1024, activation="relu"),
}


# --- config.json

# Settings of older files that follow from the model_type; transformers ignores them.
_IMPLIED_BY_TYPE: dict[ModelType, dict[str, bool]] = {
    "bart": {"normalize_before": False, "normalize_embedding": True, "static_position_embeddings": False},
    "marian": {"normalize_before": False, "normalize_embedding": False, "static_position_embeddings": True},
    "pegasus": {"normalize_before": True, "normalize_embedding": False, "static_position_embeddings": True},
}


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes."""
    model_type = cast(ModelType, settings.string("model_type"))
    for name, value in _IMPLIED_BY_TYPE[model_type].items():
        settings.allow_only(name, value)
    settings.allow_only("add_final_layer_norm", model_type == "pegasus")
    settings.allow_only("is_encoder_decoder", True)
    settings.allow_only("is_decoder", False)
    settings.allow_only("tie_word_embeddings", True)
    vocab_size = settings.integer("vocab_size")
    shared = model_type != "marian" or settings.boolean("share_encoder_decoder_embeddings", True)
    if shared:
        settings.allow_only("decoder_vocab_size", vocab_size)
    return bart_config(
        model_type,
        width=settings.integer("d_model"),
        encoder=_read_size(settings, "encoder"),
        decoder=_read_size(settings, "decoder"),
        vocab_size=vocab_size,
        target_vocab_size=None if shared else settings.integer("decoder_vocab_size", vocab_size),
        context=settings.integer("max_position_embeddings"),
        activation=settings.activation("activation_function", "gelu"),
        scaled=settings.boolean("scale_embedding", False),
        logit_bias=settings.boolean("final_logits_bias", True),
    )


def _read_size(settings: Settings, stack: str) -> StackSize:
    return StackSize(
        num_layers=settings.integer(f"{stack}_layers"),
        num_heads=settings.integer(f"{stack}_attention_heads"),
        feed_forward=settings.integer(f"{stack}_ffn_dim"),
    )


def adjust_config(config: ModelConfig, tensor_names: set[str]) -> ModelConfig:
    """Remove the logit bias if the checkpoint has none, as checkpoints without head (bart-large) do."""
    assert config.head is not None
    return replace(config, head=replace(config.head, bias="final_logits_bias" in tensor_names))


ARCHITECTURES = {
    "bart": "BartForConditionalGeneration",
    "marian": "MarianMTModel",
    "pegasus": "PegasusForConditionalGeneration",
}


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    encoder, decoder = require_type(Stack, config.encoder), require_type(Stack, config.decoder)
    head, feed_forward = require_type(Head, config.head), require_type(FeedForward, encoder.layers[0].feed_forward)
    model_type = "pegasus" if encoder.final_norm else "bart" if encoder.embedding.norm else "marian"
    data = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "is_encoder_decoder": True,
        "d_model": config.width,
        "vocab_size": encoder.embedding.vocab_size,
        "max_position_embeddings": config.context,
        **_write_size(encoder, "encoder"),
        **_write_size(decoder, "decoder"),
        "activation_function": NAMES_BY_ACTIVATION[feed_forward.activation],
        "scale_embedding": encoder.embedding.scale != 1.0,
        "tie_word_embeddings": head.tied,
    }
    if not config.share_embeddings:
        data |= {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": decoder.embedding.vocab_size}
    if not head.bias:
        data |= {"final_logits_bias": False}  # a setting of ours; transformers fills in zeros
    return require_round_trip(data, config, read_config)


def _write_size(stack: Stack, name: str) -> dict[str, int]:
    return {
        f"{name}_layers": len(stack.layers),
        f"{name}_attention_heads": stack.layers[0].attention.num_heads,
        f"{name}_ffn_dim": require_type(FeedForward, stack.layers[0].feed_forward).width,
    }


# --- tensor names

_LAYER_PARTS = {
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
    "final_layer_norm": "feed_forward_residual.norm",  # the last norm of the layer
}
_STACK_PARTS = {
    "embed_positions": "embedding.positions",
    "layernorm_embedding": "embedding.norm",
    "layer_norm": "final_norm",
    **{f"layers.{{layer}}.{theirs}": f"layers.{{layer}}.{ours}" for theirs, ours in _LAYER_PARTS.items()},
}
SOURCE, TARGET = "encoder.embedding.tokens.weight", "decoder.embedding.tokens.weight"
NAMES: NameTable = {
    "model.shared.weight": Copy((SOURCE,), only_without=TARGET),
    "model.encoder.embed_tokens.weight": Copy((SOURCE,), only_with=TARGET),
    "model.decoder.embed_tokens.weight": TARGET,
    **{
        f"model.{stack}.{theirs}.{leaf}": f"{stack}.{ours}.{leaf}"
        for stack in ("encoder", "decoder")
        for theirs, ours in _STACK_PARTS.items()
        for leaf in ("weight", "bias")
    },
    "final_logits_bias": SingleRow(("head.bias",)),
}
DUPLICATES = {
    "lm_head.weight": "model.shared.weight",
    "model.encoder.embed_tokens.weight": "model.shared.weight",
    "model.decoder.embed_tokens.weight": "model.shared.weight",
}
IGNORED_TENSORS = (
    r"model\.(encoder|decoder)\.embed_positions\.weight",  # fixed sinusoids, which are computed
    r"model\.(encoder|decoder)\.version",  # version of fairseq's file format
)

FAMILY = Family(
    name="bart",
    presets=PRESETS,
    model_types=("bart", "marian", "pegasus"),
    read_config=read_config,
    write_config=write_config,
    tensor_names=NAMES,
    base_model_prefix="model.",
    duplicates=DUPLICATES,
    ignored_tensors=IGNORED_TENSORS,
    adjust_config=adjust_config,
)
