"""BART, mBART, Marian (OPUS-MT), Pegasus and M2M-100 (NLLB): the Transformer of 2017 with biases, in five variants.

             positions             embedding norm   norm placement   final norm
    bart     learned               yes              post             no
    mbart    learned               yes              pre              yes
    marian   sines, then cosines   no               post             no
    pegasus  sines, then cosines   no               pre              yes
    m2m_100  sines, then cosines   no               pre              yes

Source, target and head share one token table; a bias is added to the logits, except in M2M-100, whose positions start
after the id of the padding token.
Sources: Lewis et al. 2020, §2.1; Liu et al. 2020, §2.2; Junczys-Dowmunt et al. 2018; Zhang et al. 2020, §6.1; Fan et
al. 2021; NLLB Team 2022; the config.json of each release.
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
from clearhead.families.bart_names import DUPLICATES, IGNORED_TENSORS, NAMES
from clearhead.families.family import Family, Preset, require_round_trip, require_type
from clearhead.families.gpt_style import multi_head_attention
from clearhead.families.settings import NAMES_BY_ACTIVATION, Settings

ModelType = Literal["bart", "mbart", "marian", "pegasus", "m2m_100"]
_WITH_FINAL_NORM: tuple[ModelType, ...] = ("mbart", "pegasus", "m2m_100")
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
    padding_id: int = 1,
) -> ModelConfig:
    """Return the config of an encoder-decoder.

    `scaled` multiplies embeddings by √width. A `target_vocab_size` gives the target a token table of its own. Positions
    of M2M-100 start after the `padding_id`.
    """
    embedding = Embedding(
        vocab_size=vocab_size,
        scale=math.sqrt(width) if scaled else 1.0,
        positions=SinusoidalPositions(layout="halves"),
    )
    if model_type in ("bart", "mbart"):
        embedding = replace(embedding, positions=LearnedPositions(num_positions=context, offset=2), norm=NORM)
    if model_type == "m2m_100":
        positions = SinusoidalPositions(layout="halves_to_end", offset=padding_id + 1)
        embedding = replace(embedding, positions=positions)
    final_norm = NORM if model_type in _WITH_FINAL_NORM else None

    def make_layer(size: StackSize, *, is_decoder: bool) -> Layer:
        attention = multi_head_attention(width, size.num_heads, pattern=Bidirectional())
        return Layer(
            attention=replace(attention, pattern=Causal()) if is_decoder else attention,
            cross_attention=attention if is_decoder else None,
            feed_forward=FeedForward(width=size.feed_forward, activation=activation, bias=True),
            norm=NORM,
            placement="pre" if final_norm else "post",
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
        logit_bias=model_type != "m2m_100",
    )


PRESETS = {
    "bart-base": _bart_preset("bart", 768, 6, 12, vocab_size=50265, context=1024, activation="gelu"),
    "bart-large": _bart_preset("bart", 1024, 12, 16, vocab_size=50265, context=1024, activation="gelu"),
    # opus-mt-en-de; the vocabulary differs from pair to pair
    "marian": _bart_preset("marian", 512, 6, 8, vocab_size=58101, context=512, activation="silu"),
    "pegasus-large": _bart_preset("pegasus", 1024, 16, 16, vocab_size=96103, context=1024, activation="relu"),
    "mbart-large-50": _bart_preset("mbart", 1024, 12, 16, vocab_size=250054, context=1024, activation="relu"),
    "m2m100-418m": _bart_preset("m2m_100", 1024, 12, 16, vocab_size=128112, context=1024, activation="relu"),
    "nllb-200-600m": _bart_preset("m2m_100", 1024, 12, 16, vocab_size=256206, context=1024, activation="relu"),
}


# --- config.json

# Settings of older files that follow from the model_type; transformers ignores them.
_IMPLIED_BY_TYPE: dict[ModelType, dict[str, bool]] = {
    "bart": {"normalize_before": False, "normalize_embedding": True, "static_position_embeddings": False},
    "marian": {"normalize_before": False, "normalize_embedding": False, "static_position_embeddings": True},
    "pegasus": {"normalize_before": True, "normalize_embedding": False, "static_position_embeddings": True},
    "mbart": {"normalize_before": True, "normalize_embedding": True, "static_position_embeddings": False},
    "m2m_100": {"normalize_before": True, "normalize_embedding": False, "static_position_embeddings": True},
}


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes."""
    model_type = cast(ModelType, settings.string("model_type"))
    for name, value in _IMPLIED_BY_TYPE[model_type].items():
        settings.allow_only(name, value)
    settings.allow_only("add_final_layer_norm", model_type in _WITH_FINAL_NORM)
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
        encoder=read_size(settings, "encoder"),
        decoder=read_size(settings, "decoder"),
        vocab_size=vocab_size,
        target_vocab_size=None if shared else settings.integer("decoder_vocab_size", vocab_size),
        context=settings.integer("max_position_embeddings"),
        activation=settings.activation("activation_function", "relu" if model_type == "m2m_100" else "gelu"),
        scaled=settings.boolean("scale_embedding", model_type == "m2m_100"),
        logit_bias=settings.boolean("final_logits_bias", model_type != "m2m_100"),
        padding_id=settings.integer("pad_token_id", 1) if model_type == "m2m_100" else 1,
    )


def read_size(settings: Settings, stack: str) -> StackSize:
    """Return the sizes of the "encoder" or the "decoder"."""
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
    "mbart": "MBartForConditionalGeneration",
    "m2m_100": "M2M100ForConditionalGeneration",
}


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    encoder, decoder = require_type(Stack, config.encoder), require_type(Stack, config.decoder)
    head, feed_forward = require_type(Head, config.head), require_type(FeedForward, encoder.layers[0].feed_forward)
    model_type, positions = _model_type(encoder), encoder.token_embedding.positions
    data = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "is_encoder_decoder": True,
        "d_model": config.width,
        "vocab_size": encoder.token_embedding.vocab_size,
        "max_position_embeddings": config.context,
        **write_size(encoder, "encoder"),
        **write_size(decoder, "decoder"),
        "activation_function": NAMES_BY_ACTIVATION[feed_forward.activation],
        "scale_embedding": encoder.token_embedding.scale != 1.0,
        "tie_word_embeddings": head.tied,
    }
    if not config.share_embeddings:
        data |= {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": decoder.token_embedding.vocab_size}
    if isinstance(positions, SinusoidalPositions) and positions.offset:
        data |= {"pad_token_id": positions.offset - 1}
    elif not head.bias:
        data |= {"final_logits_bias": False}  # a setting of ours; transformers fills in zeros
    return require_round_trip(data, config, read_config)


def _model_type(encoder: Stack) -> ModelType:
    """Return the variant that has the norms and positions of this encoder."""
    positions = encoder.token_embedding.positions
    if encoder.final_norm is None:
        return "bart" if encoder.token_embedding.norm else "marian"
    if encoder.token_embedding.norm:
        return "mbart"
    return "m2m_100" if isinstance(positions, SinusoidalPositions) and positions.offset else "pegasus"


def write_size(stack: Stack, name: str) -> dict[str, int]:
    """Return the settings of the sizes of a stack."""
    return {
        f"{name}_layers": len(stack.layers),
        f"{name}_attention_heads": stack.layers[0].attention.num_heads,
        f"{name}_ffn_dim": require_type(FeedForward, stack.layers[0].feed_forward).width,
    }


FAMILY = Family(
    name="bart",
    presets=PRESETS,
    model_types=("bart", "mbart", "marian", "pegasus", "m2m_100"),
    read_config=read_config,
    write_config=write_config,
    tensor_names=NAMES,
    base_model_prefix="model.",
    duplicates=DUPLICATES,
    ignored_tensors=IGNORED_TENSORS,
    adjust_config=adjust_config,
)
