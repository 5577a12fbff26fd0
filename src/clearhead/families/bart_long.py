"""BigBird-Pegasus and LED: relatives of Pegasus and BART for long sources.

                      positions   embedding norm   norm placement   final norm   attention of the encoder
    bigbird_pegasus   learned     no               pre              yes          all tokens (`original_full`)
    led               learned     yes              post             no           a window around each token

The released BigBird-Pegasus attends to blocks, some of them random, which is not supported. transformers uses full
attention instead for sources of up to 704 tokens, and for all sources if config.json says `original_full`; only such a
config.json is read here. LED has a second set of projections for tokens that a caller marks as global. transformers
uses them only with a `global_attention_mask`, which its `generate` does not make. They are not loaded, so LED cannot be
saved for transformers.
Sources: Zaheer et al. 2020, §4 and E.5; Beltagy et al. 2020, §7; the config.json of each release.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from clearhead.architecture import (
    Activation,
    Bidirectional,
    Causal,
    CenteredWindow,
    Embedding,
    FeedForward,
    Head,
    Layer,
    LearnedPositions,
    ModelConfig,
    Stack,
)
from clearhead.errors import ClearheadError
from clearhead.families.bart import NORM, adjust_config, read_size, write_size
from clearhead.families.bart_names import stack_names
from clearhead.families.family import Family, require_round_trip, require_type
from clearhead.families.gpt_style import multi_head_attention
from clearhead.families.settings import NAMES_BY_ACTIVATION, Settings


def _stack(embedding: Embedding, layer: Layer, windows: Sequence[int | None]) -> Stack:
    """Return a stack of layers like `layer`, whose attention has these windows; None: all tokens."""
    layers = []
    for window in windows:
        pattern = layer.attention.pattern if window is None else CenteredWindow(reach=window // 2)
        layers.append(replace(layer, attention=replace(layer.attention, pattern=pattern)))
    return Stack(embedding=embedding, layers=tuple(layers), final_norm=NORM if layer.placement == "pre" else None)


def _config(
    settings: Settings, *, lengths: tuple[int, int], bias: bool, windows: Sequence[int | None], embedding: Embedding
) -> ModelConfig:
    """Return the config of an encoder-decoder; `lengths` are the numbers of positions of both stacks."""
    width, stacks = settings.integer("d_model"), []
    placement: Any = "post" if embedding.norm else "pre"
    activation = settings.activation("activation_function", "gelu" if embedding.norm else "gelu_new")
    settings.allow_only("is_encoder_decoder", True)
    settings.allow_only("is_decoder", False)
    settings.allow_only("tie_word_embeddings", True)
    for name, length in zip(("encoder", "decoder"), lengths, strict=True):
        size = read_size(settings, name)
        attention = multi_head_attention(
            width, size.num_heads, input_bias=bias, output_bias=bias, pattern=Bidirectional()
        )
        layer = Layer(
            attention=attention if name == "encoder" else replace(attention, pattern=Causal()),
            cross_attention=None if name == "encoder" else attention,
            feed_forward=FeedForward(width=size.feed_forward, activation=activation, bias=True),
            norm=NORM,
            placement=placement,
        )
        own = replace(embedding, positions=LearnedPositions(num_positions=length))
        patterns = windows if name == "encoder" else [None] * size.num_layers
        stacks.append(_stack(own, layer, patterns))
    head = Head(bias=settings.boolean("final_logits_bias", True))
    return ModelConfig(
        width=width,
        context=max(lengths),
        encoder=stacks[0],
        decoder=stacks[1],
        head=head,
        share_embeddings=True,
    )


def _shared(prefix: str) -> dict[str, str]:
    """Return the tensors that may repeat the token table."""
    names = ("lm_head.weight", f"{prefix}encoder.embed_tokens.weight", f"{prefix}decoder.embed_tokens.weight")
    return dict.fromkeys(names, f"{prefix}shared.weight")


# --- BigBird-Pegasus


_ACTIVATION: dict[Activation, str] = {"gelu_tanh": "gelu_new"}  # the name in the released config.json


def _read_bigbird_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json of BigBird-Pegasus describes; raise ClearheadError for block attention."""
    if settings.string("attention_type", "block_sparse") != "original_full":
        random_blocks, block = settings.integer("num_random_blocks", 3), settings.integer("block_size", 64)
        raise ClearheadError(
            f"{settings.where}: attention_type 'block_sparse' is not supported; set it to 'original_full', which "
            f"computes the same for sources of up to {(5 + 2 * random_blocks) * block} tokens"
        )
    length, width = settings.integer("max_position_embeddings"), settings.integer("d_model")
    scale = math.sqrt(width) if settings.boolean("scale_embedding", True) else 1.0
    embedding = Embedding(vocab_size=settings.integer("vocab_size"), scale=scale)
    windows = [None] * settings.integer("encoder_layers")
    bias = settings.boolean("use_bias", False)
    return _config(settings, lengths=(length, length), bias=bias, windows=windows, embedding=embedding)


def _write_bigbird_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    encoder, decoder = require_type(Stack, config.encoder), require_type(Stack, config.decoder)
    feed_forward = require_type(FeedForward, encoder.layers[0].feed_forward)
    data = {
        "architectures": ["BigBirdPegasusForConditionalGeneration"],
        "model_type": "bigbird_pegasus",
        "is_encoder_decoder": True,
        "attention_type": "original_full",
        "d_model": config.width,
        "vocab_size": encoder.token_embedding.vocab_size,
        "max_position_embeddings": config.context,
        **write_size(encoder, "encoder"),
        **write_size(decoder, "decoder"),
        "activation_function": (NAMES_BY_ACTIVATION | _ACTIVATION)[feed_forward.activation],
        "scale_embedding": encoder.token_embedding.scale != 1.0,
        "use_bias": encoder.layers[0].attention.input_bias,  # type: ignore[union-attr]
    }
    if not require_type(Head, config.head).bias:
        data |= {"final_logits_bias": False}  # a setting of ours; transformers fills in zeros
    return require_round_trip(data, config, _read_bigbird_config)


_BIGBIRD: dict[str, Any] = {
    "d_model": 1024,
    "encoder_layers": 16,
    "decoder_layers": 16,
    "vocab_size": 96103,
    "use_bias": False,
}
_BIGBIRD |= {"encoder_attention_heads": 16, "decoder_attention_heads": 16, "encoder_ffn_dim": 4096}
_BIGBIRD |= {"decoder_ffn_dim": 4096, "max_position_embeddings": 4096, "attention_type": "original_full"}
_BIGBIRD_ATTENTION = {"self.query": "query", "self.key": "key", "self.value": "value", "output": "output"}

BIGBIRD_PEGASUS = Family(
    name="bigbird-pegasus",
    presets={"bigbird-pegasus-large": lambda: _read_bigbird_config(Settings(_BIGBIRD, "bigbird_pegasus"))},
    model_types=("bigbird_pegasus",),
    read_config=_read_bigbird_config,
    write_config=_write_bigbird_config,
    tensor_names=stack_names("model.", _BIGBIRD_ATTENTION, final_norm="layernorm_embedding"),
    base_model_prefix="model.",
    duplicates=_shared("model."),
    adjust_config=adjust_config,
)


# --- LED


def _read_led_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json of LED describes."""
    num_layers = settings.integer("encoder_layers")
    given = settings.data.get("attention_window", 512)
    windows = given if isinstance(given, list) else [given] * num_layers
    if len(windows) != num_layers or any(type(each) is not int or each < 2 or each % 2 for each in windows):
        raise ClearheadError(f"{settings.where}: 'attention_window' must be one even number, or one for each layer")
    embedding = Embedding(vocab_size=settings.integer("vocab_size"), norm=NORM)
    encoder_length = settings.integer("max_encoder_position_embeddings", 16384)
    lengths = encoder_length, settings.integer("max_decoder_position_embeddings", 1024)
    return _config(settings, lengths=lengths, bias=True, windows=[*windows], embedding=embedding)


def _write_led_config(config: ModelConfig) -> dict[str, Any]:
    """Raise ClearheadError: the projections of LED's global attention are not loaded."""
    raise ClearheadError(
        "LED cannot be saved for transformers, because its global attention was not loaded; save it as native"
    )


_LED: dict[str, Any] = {
    "d_model": 768,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "vocab_size": 50265,
    "attention_window": 1024,
}
_LED |= {"encoder_attention_heads": 12, "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
_LED_ATTENTION = {f"longformer_self_attn.{name}": name for name in ("query", "key", "value")} | {"output": "output"}

LED = Family(
    name="led",
    presets={"led-base-16384": lambda: _read_led_config(Settings(_LED, "led"))},
    model_types=("led",),
    read_config=_read_led_config,
    write_config=_write_led_config,
    tensor_names=stack_names("led.", _LED_ATTENTION),
    base_model_prefix="led.",
    duplicates=_shared("led."),
    # the projections of global attention, which transformers uses only with a global_attention_mask
    ignored_tensors=(r"led\.encoder\.layers\.\d+\.self_attn\.longformer_self_attn\.(query|key|value)_global\.\w+",),
    adjust_config=adjust_config,
)
FAMILIES = (BIGBIRD_PEGASUS, LED)
