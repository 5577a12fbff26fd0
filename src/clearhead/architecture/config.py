"""Configs of a model and its layers.

    ModelConfig(width=64, context=128, decoder=Stack(embedding=..., layers=(layer,) * 4), head=Head())

A `ModelConfig` has one or two `Stack`s, a stack is a tuple of `Layer`s, and a layer consists of an attention config, a
feed-forward config and a norm. Each choice is its own type, so that invalid combinations cannot be written. All
configs are frozen and validated on construction.
"""

from dataclasses import dataclass, field
from typing import Literal

from clearhead.architecture.attention import GroupedAttention, LatentAttention
from clearhead.architecture.classifier import Classifier, HeadTransform
from clearhead.architecture.feed_forward import Experts, FeedForward
from clearhead.architecture.norms import Norm
from clearhead.architecture.patterns import Bidirectional
from clearhead.architecture.positions import (
    Disentangled,
    LearnedPositions,
    NoPosition,
    RelativeBuckets,
    SinusoidalPositions,
)
from clearhead.config import CheckedConfig
from clearhead.errors import ClearheadError, require


@dataclass(frozen=True, kw_only=True)
class Layer(CheckedConfig):
    """Config of one block: its branches, its norm and where the norm is placed (see model/block.py)."""

    attention: GroupedAttention | LatentAttention
    cross_attention: GroupedAttention | None = None
    feed_forward: FeedForward | Experts
    norm: Norm
    attention_norm: bool = True  # False: attention reads the residual stream without a norm (ModernBERT's first layer)
    placement: Literal["pre", "post", "sandwich", "branch", "parallel", "parallel_norms"] = "pre"
    branch_scale: float = 1.0  # multiplies what each branch adds to the residual stream (Granite)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.attention_norm or self.placement in ("pre", "sandwich", "parallel_norms"),
            f"placement {self.placement!r} has no norm that only attention reads; set attention_norm to true",
        )
        cross = self.cross_attention
        if cross is not None:
            require(
                not self.placement.startswith("parallel"),
                f"placement {self.placement!r} does not support cross-attention; use 'pre', 'post' or 'sandwich'",
            )
            require(
                isinstance(cross.position, NoPosition) and isinstance(cross.pattern, Bidirectional),
                "cross-attention must have position NoPosition and pattern Bidirectional",
            )


@dataclass(frozen=True, kw_only=True)
class Embedding(CheckedConfig):
    """Token embedding: table lookup · scale, plus token types and positions, then an optional norm.

    If its tables have another `width` than the model, a linear layer follows (ALBERT, ELECTRA).
    """

    MAY_BE_ZERO = ("num_token_types",)
    KIND_IS_OPTIONAL = True  # files written before AudioEmbedding existed give no kind

    vocab_size: int
    scale: float = 1.0
    positions: LearnedPositions | SinusoidalPositions | None = None
    num_token_types: int = 0  # segment embeddings (BERT)
    norm: Norm | None = None
    width: int | None = None  # of the tables; None: that of the model


@dataclass(frozen=True, kw_only=True)
class AudioEmbedding(CheckedConfig):
    """Mel bands to vectors (Whisper): two convolutions of width 3 with GELU, plus fixed sinusoidal positions.

    The second convolution has stride 2, so that `num_positions` vectors come from twice as many frames. The network
    reads exactly this many frames; shorter audio is padded with silence.
    """

    num_mel_bands: int
    num_positions: int


@dataclass(frozen=True, kw_only=True)
class Stack(CheckedConfig):
    """An embedding, a sequence of layers, and the norm after the last one (None in post-norm models)."""

    embedding: Embedding | AudioEmbedding
    layers: tuple[Layer, ...]
    final_norm: Norm | None = None
    shared_layers: bool = False  # all layers have the same weights (ALBERT)

    def __post_init__(self) -> None:
        layers: object = self.layers
        if isinstance(layers, list):
            object.__setattr__(self, "layers", tuple(layers))
        super().__post_init__()
        require(len(self.layers) > 0, "a stack needs at least one layer")
        is_uniform = len(set(self.layers)) == 1
        require(is_uniform or not self.shared_layers, "layers that share their weights must have equal configs")
        require(
            len({_relative_table(layer) for layer in self.layers} - {None}) <= 1,
            "all layers of a stack share one table of relative positions; give them the same RelativeBuckets and "
            "num_heads, or the same Disentangled",
        )

    @property
    def token_embedding(self) -> Embedding:
        """The embedding of a stack that reads tokens; raise ClearheadError if it reads audio."""
        if isinstance(self.embedding, AudioEmbedding):
            raise ClearheadError("the encoder of this model reads audio, not tokens; use transcribe")
        return self.embedding


def _relative_table(layer: Layer) -> tuple[object, ...] | None:
    """Return what a layer needs of the table of relative positions that all layers share; None if it needs none."""
    match layer.attention.position:
        case RelativeBuckets(per_layer=True):  # each has its own, and none is shared
            return ()
        case RelativeBuckets() as position:
            return position, layer.attention.num_heads
        case Disentangled() as position:
            return (position,)
    return None


@dataclass(frozen=True, kw_only=True)
class Head(CheckedConfig):
    """Hidden states to logits: softcap(transform(h) · scale · Wᵀ + bias) (book C2).

    If tied, W is the embedding table of the output stack.
    """

    tied: bool = True
    bias: bool = False
    transform: HeadTransform | None = None
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True)
class Dropout(CheckedConfig):
    """Dropout probabilities, used in training only."""

    embedding: float = 0.0
    residual: float = 0.0  # on the output of each branch
    attention: float = 0.0  # on the attention weights
    activation: float = 0.0  # inside the feed-forward

    MAY_BE_ZERO = ("embedding", "residual", "attention", "activation")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in vars(self).items():
            require(0.0 <= value < 1.0, f"Dropout.{name} is {value}; it must be at least 0 and less than 1")


@dataclass(frozen=True, kw_only=True)
class NormalInitial(CheckedConfig):
    """Draw matrices from N(0, deviation²).

    If residual_scaled, divide the last matrix of each branch by √(2L).
    """

    deviation: float = 0.02
    residual_scaled: bool = False


@dataclass(frozen=True, kw_only=True)
class XavierInitial(CheckedConfig):
    """Draw matrices uniformly from ± √(6 / (rows + columns)) (Glorot & Bengio 2010; book C3)."""

    tables: bool = False  # draw embeddings and head likewise (Annotated Transformer); otherwise from N(0, 1/D)


@dataclass(frozen=True, kw_only=True)
class FanInInitial(CheckedConfig):
    """Draw matrices from N(0, 1 / columns) and embeddings from N(0, 1) (PaLM §2).

    The norms inside each block do not apply to the embeddings, and a tied head is scaled by 1/√width instead.
    """


@dataclass(frozen=True, kw_only=True)
class ModelConfig(CheckedConfig):
    """Config of a whole model.

    A decoder alone is a language model, an encoder alone is a model such as BERT, and both together translate. Without
    a head the network returns hidden states.
    """

    width: int
    context: int  # longest sequence it was trained for; a hard limit only with learned positions
    encoder: Stack | None = None
    decoder: Stack | None = None
    head: Head | None = None
    share_embeddings: bool = False  # encoder and decoder share one token table
    pooler: bool = False  # tanh(W h_first + b) for sentence tasks (BERT); see Transformer.pool
    classifier: Classifier | None = None  # scores of labels; see Transformer.classify
    dropout: Dropout = field(default_factory=Dropout)
    initial: NormalInitial | XavierInitial | FanInInitial = field(default_factory=NormalInitial)

    def __post_init__(self) -> None:
        super().__post_init__()
        both = self.encoder is not None and self.decoder is not None
        self._check_audio()
        require(self.encoder is not None or self.decoder is not None, "a model needs an encoder or a decoder")
        require(both or not self.share_embeddings, "share_embeddings needs an encoder and a decoder")
        for name, stack, cross in (("encoder", self.encoder, False), ("decoder", self.decoder, both)):
            for number, layer in enumerate(stack.layers if stack else ()):
                require(
                    (layer.cross_attention is not None) == cross,
                    f"{name} layer {number} must {'' if cross else 'not '}have cross_attention in this model",
                )
        if self.classifier is not None:
            require(self.pooler or self.classifier.reads != "pooled", "a classifier that reads 'pooled' needs a pooler")
            require(not both, "a classifier needs a model with one stack")
        if self.head is not None and self.output_stack.token_embedding.width is not None:
            require(self.head.transform is not None, "a head after an embedding of another width needs a transform")
        if self.share_embeddings:
            assert self.encoder is not None
            assert self.decoder is not None
            source, target = self.encoder.token_embedding.vocab_size, self.decoder.token_embedding.vocab_size
            require(source == target, f"share_embeddings needs equal vocabulary sizes, not {source} and {target}")

    def _check_audio(self) -> None:
        """Raise ClearheadError unless audio is the input of an encoder whose output a decoder reads as text."""
        if self.decoder is not None:
            require(isinstance(self.decoder.embedding, Embedding), "a decoder reads tokens; give it an Embedding")
        if self.reads_audio:
            require(self.decoder is not None, "an encoder that reads audio needs a decoder")
            require(not self.share_embeddings, "an encoder that reads audio has no token table to share")

    @property
    def reads_audio(self) -> bool:
        """Whether the input of the encoder is audio instead of tokens."""
        return self.encoder is not None and isinstance(self.encoder.embedding, AudioEmbedding)

    @property
    def output_stack(self) -> Stack:
        """The stack that produces the output: the decoder if there is one, else the encoder."""
        stack = self.decoder or self.encoder
        assert stack is not None
        return stack

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary of the output stack."""
        return self.output_stack.token_embedding.vocab_size

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has both an encoder and a decoder."""
        return self.encoder is not None and self.decoder is not None
