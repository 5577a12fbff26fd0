"""What to train: the [model] table of a recipe, made into a network for a vocabulary.

    config = model_config(DecoderModel(width=384, num_layers=6, num_heads=6, context=256), vocab_size=65)

A preset by name, a model to fine-tune, a small decoder or translator by its sizes, an RNN, or any config spelled out.
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
from clearhead.config import Checked
from clearhead.errors import ClearheadError, require
from clearhead.families import preset, transformer
from clearhead.model import RecurrentConfig

NORM = RmsNorm(epsilon=1e-6)


@dataclass(frozen=True, kw_only=True)
class PresetModel:
    """A released architecture with new weights."""

    name: str
    vocab_size: int | None = None  # None: the preset's; a multiple of 128 is fastest
    dropout: Dropout | None = None  # None: the preset's


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A trained model and its tokenizer, to go on with: an installed name, a folder or a file."""

    name: str
    dropout: Dropout | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderModel(Checked):
    """A language model of today's kind: RMS norm first, rotary positions, gated SiLU, no biases, tied head."""

    MAY_BE_ZERO = ("dropout",)

    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None  # None: as num_heads
    feed_forward: int | None = None  # None: 8/3 of the width, up to a multiple of 8
    context: int
    head_norm: bool = False  # RMS norm of queries and keys
    theta: float = 10000.0
    dropout: float = 0.0  # of embedding, branches and attention weights
    deviation: float = 0.02  # of the initial weights


@dataclass(frozen=True, kw_only=True)
class TranslatorModel(Checked):
    """The encoder-decoder of Vaswani et al. with one table for source, target and head, and the norms first."""

    MAY_BE_ZERO = ("dropout", "weight_dropout")

    width: int
    num_layers: int  # of each half
    num_heads: int
    feed_forward: int
    context: int
    dropout: float = 0.0  # of embedding and branches
    weight_dropout: float = 0.0  # of attention weights and inside the feed-forward


@dataclass(frozen=True, kw_only=True)
class RecurrentModel(Checked):
    """The RNN encoder-decoder of model/recurrent.py, its two vocabularies being the tokenizer's."""

    MAY_BE_ZERO = ("dropout",)

    width: int
    num_layers: int = 1
    context: int
    attends: bool = True
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    """Every choice spelled out, as `clearhead.to_toml` writes a config."""

    config: ModelConfig


ModelChoice = PresetModel | LoadedModel | DecoderModel | TranslatorModel | RecurrentModel | WholeModel


def model_config(model: ModelChoice, vocab_size: int) -> ModelConfig | RecurrentConfig:
    """The config of a new network that can say `vocab_size` tokens."""
    match model:
        case DecoderModel():
            return decoder_config(model, vocab_size)
        case TranslatorModel():
            return translator_config(model, vocab_size)
        case RecurrentModel():
            return recurrent_config(model, vocab_size)
        case PresetModel():
            config = preset_config(model)
        case WholeModel():
            config = model.config
        case LoadedModel():
            raise ClearheadError("a loaded model has a config of its own")
    require(
        config.vocab_size >= vocab_size,
        f"the tokenizer has {vocab_size} tokens, the model only {config.vocab_size}; set vocab_size to {vocab_size}",
    )
    return config


def decoder_config(model: DecoderModel, vocab_size: int) -> ModelConfig:
    require(model.width % model.num_heads == 0, f"width {model.width} is not a multiple of num_heads {model.num_heads}")
    attention = GroupedAttention(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads or model.num_heads,
        head_width=model.width // model.num_heads,
        position=Rope(theta=model.theta),
        head_norm=HeadNorm(norm=NORM) if model.head_norm else None,
    )
    inner = model.feed_forward or -(-8 * model.width // 24) * 8
    layer = Layer(attention=attention, feed_forward=FeedForward(width=inner, activation="silu", gated=True), norm=NORM)
    return ModelConfig(
        width=model.width,
        context=model.context,
        decoder=Stack(embedding=Embedding(vocab_size=vocab_size), layers=(layer,) * model.num_layers, final_norm=NORM),
        head=Head(),
        dropout=Dropout(embedding=model.dropout, residual=model.dropout, attention=model.dropout),
        initial=NormalInitial(deviation=model.deviation, residual_scaled=True),
    )


def translator_config(model: TranslatorModel, vocab_size: int) -> ModelConfig:
    return transformer.transformer(
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


def recurrent_config(model: RecurrentModel, vocab_size: int) -> RecurrentConfig:
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


def preset_config(model: PresetModel) -> ModelConfig:
    config = preset(model.name)
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
