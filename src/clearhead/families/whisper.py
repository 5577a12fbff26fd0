"""Whisper: an encoder of mel bands and a decoder of text, for speech in many languages.

Two convolutions turn 30 seconds of sound into 1500 vectors; otherwise both stacks are those of a pre-norm Transformer
with GELU and biases, except on the key projections. Positions are sinusoids in the encoder and learned in the decoder.
Sources: Radford et al. 2022, §2.2 and Table 1; the config.json of openai/whisper-* (large-v3 and large-v3-turbo have
128 bands and a token for Cantonese; turbo keeps 4 of the decoder's 32 layers).
"""

from dataclasses import replace
from typing import Any

from clearhead.architecture import (
    Activation,
    AudioEmbedding,
    Bidirectional,
    Causal,
    Embedding,
    FeedForward,
    Head,
    Layer,
    LayerNorm,
    LearnedPositions,
    ModelConfig,
    Stack,
)
from clearhead.families.bart import StackSize, read_size, write_size
from clearhead.families.bart_names import NAMES as BART_NAMES
from clearhead.families.family import Family, Preset, require_round_trip, require_type
from clearhead.families.gpt_style import multi_head_attention
from clearhead.families.settings import NAMES_BY_ACTIVATION, Settings
from clearhead.families.tensor_rules import NameTable, with_biases

NORM = LayerNorm(epsilon=1e-5)  # PyTorch's default; config.json has no setting for it


def _whisper_config(
    *,
    width: int,
    encoder: StackSize,
    decoder: StackSize,
    vocab_size: int,
    num_mel_bands: int,
    num_source_positions: int = 1500,
    context: int = 448,
    activation: Activation = "gelu",
    tied: bool = True,
) -> ModelConfig:
    """Return the config of a speech model; `context` is the longest text in tokens."""

    def make_layer(size: StackSize, *, is_decoder: bool) -> Layer:
        attention = multi_head_attention(width, size.num_heads, pattern=Bidirectional(), key_bias=False)
        return Layer(
            attention=replace(attention, pattern=Causal()) if is_decoder else attention,
            cross_attention=attention if is_decoder else None,
            feed_forward=FeedForward(width=size.feed_forward, activation=activation, bias=True),
            norm=NORM,
        )

    return ModelConfig(
        width=width,
        context=context,
        encoder=Stack(
            embedding=AudioEmbedding(num_mel_bands=num_mel_bands, num_positions=num_source_positions),
            layers=(make_layer(encoder, is_decoder=False),) * encoder.num_layers,
            final_norm=NORM,
        ),
        decoder=Stack(
            embedding=Embedding(vocab_size=vocab_size, positions=LearnedPositions(num_positions=context)),
            layers=(make_layer(decoder, is_decoder=True),) * decoder.num_layers,
            final_norm=NORM,
        ),
        head=Head(tied=tied),
    )


def _preset(width: int, num_layers: int, num_decoder_layers: int, *, vocab_size: int, num_mel_bands: int) -> Preset:
    encoder = StackSize(num_layers=num_layers, num_heads=width // 64, feed_forward=4 * width)
    decoder = replace(encoder, num_layers=num_decoder_layers)
    return lambda: _whisper_config(
        width=width, encoder=encoder, decoder=decoder, vocab_size=vocab_size, num_mel_bands=num_mel_bands
    )


PRESETS = {
    "whisper-tiny": _preset(384, 4, 4, vocab_size=51865, num_mel_bands=80),
    "whisper-base": _preset(512, 6, 6, vocab_size=51865, num_mel_bands=80),
    "whisper-small": _preset(768, 12, 12, vocab_size=51865, num_mel_bands=80),
    "whisper-medium": _preset(1024, 24, 24, vocab_size=51865, num_mel_bands=80),
    "whisper-large-v3": _preset(1280, 32, 32, vocab_size=51866, num_mel_bands=128),
    "whisper-large-v3-turbo": _preset(1280, 32, 4, vocab_size=51866, num_mel_bands=128),
}


# --- config.json


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes."""
    settings.allow_only("is_encoder_decoder", True)
    settings.allow_only("scale_embedding", False)
    # to transformers, another name of the same setting, which it prefers
    settings.allow_only("num_key_value_heads", settings.data.get("encoder_attention_heads"))
    settings.allow_only("use_weighted_layer_sum", False)  # of a class that classifies audio
    return _whisper_config(
        width=settings.integer("d_model"),
        encoder=read_size(settings, "encoder"),
        decoder=read_size(settings, "decoder"),
        vocab_size=settings.integer("vocab_size"),
        num_mel_bands=settings.integer("num_mel_bins", 80, at_least=1),
        num_source_positions=settings.integer("max_source_positions", 1500, at_least=1),
        context=settings.integer("max_target_positions", 448, at_least=1),
        activation=settings.activation("activation_function", "gelu"),
        tied=settings.boolean("tie_word_embeddings", True),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    encoder, decoder = require_type(Stack, config.encoder), require_type(Stack, config.decoder)
    audio, head = require_type(AudioEmbedding, encoder.embedding), require_type(Head, config.head)
    feed_forward = require_type(FeedForward, encoder.layers[0].feed_forward)
    data = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "d_model": config.width,
        "vocab_size": config.vocab_size,
        "num_mel_bins": audio.num_mel_bands,
        "max_source_positions": audio.num_positions,
        "max_target_positions": config.context,
        **write_size(encoder, "encoder"),
        **write_size(decoder, "decoder"),
        "activation_function": NAMES_BY_ACTIVATION[feed_forward.activation],
        "tie_word_embeddings": head.tied,
    }
    return require_round_trip(data, config, read_config)


NAMES: NameTable = {
    **BART_NAMES,  # of those, entries of a shared token table and of embedding norms never apply
    **with_biases(
        {
            "model.encoder.conv1": "encoder.embedding.convolution",
            "model.encoder.conv2": "encoder.embedding.strided",
        }
    ),
    "model.encoder.embed_positions.weight": "encoder.embedding.positions",
    "proj_out.weight": "head.weight",
}

FAMILY = Family(
    name="whisper",
    presets=PRESETS,
    model_types=("whisper",),
    read_config=read_config,
    write_config=write_config,
    tensor_names=NAMES,
    base_model_prefix="model.",
    duplicates={"proj_out.weight": "model.decoder.embed_tokens.weight"},
)
