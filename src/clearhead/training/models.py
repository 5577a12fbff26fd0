"""Describe the model to train: the [model] table of a recipe.

    config = build_model_config(DecoderModel(width=384, num_layers=6, num_heads=6, context=256), vocab_size=65)

The choices are a preset, a saved model to fine-tune, a small decoder or encoder-decoder given by its sizes, an RNN, and
a complete ModelConfig.
"""

from dataclasses import dataclass, replace

from clearhead.architecture import (
    Dropout,
    Embedding,
    FeedForward,
    GroupedAttention,
    Head,
    HeadNorm,
    Layer,
    ModelConfig,
    NormalInitial,
    RmsNorm,
    Rope,
    Stack,
)
from clearhead.config import MAX_LAYERS, CheckedConfig
from clearhead.errors import ClearheadError, require
from clearhead.families import preset, transformer_config
from clearhead.model import RecurrentConfig

NORM = RmsNorm(epsilon=1e-6)


def _check_num_layers(num_layers: int) -> None:
    """Raise ClearheadError if building the layers one by one would take forever."""
    require(num_layers <= MAX_LAYERS, f"model.num_layers is {num_layers}; it must be at most {MAX_LAYERS}")


@dataclass(frozen=True, kw_only=True)
class PresetModel:
    """A released architecture with new weights."""

    name: str  # name of a preset
    vocab_size: int | None = None  # None: the preset's; multiples of 128 are fastest
    dropout: Dropout | None = None  # None: the preset's


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A saved model with its tokenizer, given by an installed name, a folder or a file."""

    name: str  # an installed name, a folder or a file
    dropout: Dropout | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderModel(CheckedConfig):
    """A modern language model: pre-norm RMS norms, rotary positions, gated SiLU, no biases, tied head."""

    MAY_BE_ZERO = ("dropout",)

    width: int  # width of the residual stream
    num_layers: int  # number of layers
    num_heads: int  # number of query heads
    num_kv_heads: int | None = None  # none: the same as num_heads
    feed_forward: int | None = None  # inner width; none: 8/3 of `width`, rounded up to a multiple of 8
    context: int  # longest sequence in tokens
    head_norm: bool = False  # apply an RMS norm to queries and keys
    theta: float = 10000.0  # base of the rotary frequencies
    dropout: float = 0.0  # dropout of embeddings, branches and attention weights
    deviation: float = 0.02  # standard deviation of the initial weights

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_num_layers(self.num_layers)


@dataclass(frozen=True, kw_only=True)
class TranslatorModel(CheckedConfig):
    """The encoder-decoder of Vaswani et al., with pre-norm and one shared table for source, target and head."""

    MAY_BE_ZERO = ("dropout", "weight_dropout")

    width: int  # width of the residual stream
    num_layers: int  # number of layers in the encoder, and as many in the decoder
    num_heads: int  # number of attention heads
    feed_forward: int  # width of the feed-forward layers
    context: int  # longest sequence in tokens
    dropout: float = 0.0  # dropout of embeddings and branches
    weight_dropout: float = 0.0  # dropout of attention weights and inside the feed-forward

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_num_layers(self.num_layers)


@dataclass(frozen=True, kw_only=True)
class RecurrentModel(CheckedConfig):
    """The RNN encoder-decoder of model/recurrent.py. Source and target share the tokenizer's vocabulary."""

    MAY_BE_ZERO = ("dropout",)

    width: int  # width of embeddings and states
    num_layers: int = 1
    context: int  # longest sequence in tokens
    attends: bool = True  # attend to the encoder output, by dot-product attention
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_num_layers(self.num_layers)


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    """A complete ModelConfig, in the form that `clearhead.to_toml` writes."""

    config: ModelConfig


ModelChoice = PresetModel | LoadedModel | DecoderModel | TranslatorModel | RecurrentModel | WholeModel


def build_model_config(model: ModelChoice, vocab_size: int) -> ModelConfig | RecurrentConfig:
    """Return the config of a new network for a vocabulary of `vocab_size` tokens."""
    match model:
        case DecoderModel():
            return _decoder_config(model, vocab_size)
        case TranslatorModel():
            return _translator_config(model, vocab_size)
        case RecurrentModel():
            return _recurrent_config(model, vocab_size)
        case PresetModel():
            config = _preset_config(model)
        case WholeModel():
            config = model.config
        case LoadedModel():
            raise ClearheadError("a loaded model already has a config; use its own")
    require(not config.reads_audio, "a model that reads audio cannot be trained by a recipe, which has no audio data")
    require(
        config.vocab_size >= vocab_size,
        f"the tokenizer has {vocab_size} tokens, but the model only {config.vocab_size}; "
        f"set vocab_size to {vocab_size}",
    )
    return config


def _decoder_config(model: DecoderModel, vocab_size: int) -> ModelConfig:
    require(
        model.width % model.num_heads == 0,
        f"model.width is {model.width}; it must be a multiple of model.num_heads, {model.num_heads}",
    )
    attention = GroupedAttention(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads or model.num_heads,
        head_width=model.width // model.num_heads,
        position=Rope(theta=model.theta),
        head_norm=HeadNorm(norm=NORM) if model.head_norm else None,
    )
    feed_forward_width = model.feed_forward or -(-8 * model.width // 24) * 8
    feed_forward = FeedForward(width=feed_forward_width, activation="silu", gated=True)
    layer = Layer(attention=attention, feed_forward=feed_forward, norm=NORM)
    return ModelConfig(
        width=model.width,
        context=model.context,
        decoder=Stack(embedding=Embedding(vocab_size=vocab_size), layers=(layer,) * model.num_layers, final_norm=NORM),
        head=Head(),
        dropout=Dropout(embedding=model.dropout, residual=model.dropout, attention=model.dropout),
        initial=NormalInitial(deviation=model.deviation, residual_scaled=True),
    )


def _translator_config(model: TranslatorModel, vocab_size: int) -> ModelConfig:
    return transformer_config(
        width=model.width,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        feed_forward=model.feed_forward,
        source_vocab_size=vocab_size,
        target_vocab_size=vocab_size,
        context=model.context,
        placement="pre",
        dropout=Dropout(
            embedding=model.dropout,
            residual=model.dropout,
            attention=model.weight_dropout,
            activation=model.weight_dropout,
        ),
    )


def _recurrent_config(model: RecurrentModel, vocab_size: int) -> RecurrentConfig:
    return RecurrentConfig(
        source_vocab_size=vocab_size,
        target_vocab_size=vocab_size,
        embedding_width=model.width,
        width=model.width,
        num_layers=model.num_layers,
        cell="gru",
        attention="dot_product" if model.attends else "none",
        dropout=model.dropout,
        context=model.context,
    )


def _preset_config(model: PresetModel) -> ModelConfig:
    config = preset(model.name)
    if config.reads_audio:
        return config  # build_model_config refuses it
    if model.dropout is not None:
        config = replace(config, dropout=model.dropout)
    if model.vocab_size is None:
        return config
    stacks = {name: getattr(config, name) for name in ("encoder", "decoder") if getattr(config, name) is not None}
    resized = {
        name: replace(stack, embedding=replace(stack.embedding, vocab_size=model.vocab_size))
        for name, stack in stacks.items()
    }
    return replace(config, **resized)
