"""What a model is, as data: every choice is a type of its own, so a wrong mix cannot be spelled.

    ModelConfig(width=64, context=128, decoder=Stack(embedding=..., layers=(layer,) * 4), head=Head())

Read from the bottom up: a `ModelConfig` has one or two `Stack`s, a stack is a tuple of `Layer`s, a layer is an
attention, a feed-forward and a norm. All are frozen and checked at birth. The families room fills these in.
"""

from dataclasses import dataclass, field
from typing import Literal

from clearhead.architecture.branches import Activation, Experts, FeedForward
from clearhead.architecture.parts import (
    AttentionPattern,
    Bidirectional,
    Causal,
    LearnedPositions,
    NoPosition,
    Norm,
    Position,
    RelativeBuckets,
    RmsNorm,
    Rope,
    SinusoidalPositions,
)
from clearhead.config import Checked
from clearhead.errors import require

# --- attention


@dataclass(frozen=True, kw_only=True)
class HeadNorm(Checked):
    """RMS norm of each query and key head with a learned weight, before the rotation (Qwen 3, Gemma 3)."""

    norm: RmsNorm


@dataclass(frozen=True, kw_only=True)
class RotatedHeadNorm(Checked):
    """RMS norm of each query and key head without weight, after the rotation (Llama 4)."""

    epsilon: float


@dataclass(frozen=True, kw_only=True)
class QueryTemperature(Checked):
    """Queries grow with the index t: 1 + scale · ln(1 + floor((t + 1) / floor)) (Llama 4)."""

    floor: int
    scale: float


@dataclass(frozen=True, kw_only=True)
class ScoreTemperature(Checked):
    """Scores, after the cap, times log2(t) / log2(length) where the index t exceeds length (Grok 2)."""

    length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.length > 1, f"ScoreTemperature.length is {self.length}; its logarithm must exceed 0")


@dataclass(frozen=True, kw_only=True)
class GroupedAttention(Checked):
    """num_kv_heads = num_heads: multi-head; 1: multi-query; between: grouped-query. Book A1-A7, A10."""

    num_heads: int
    num_kv_heads: int
    head_width: int
    value_width: int | None = None  # None: as head_width
    position: Position = NoPosition()
    pattern: AttentionPattern = Causal()
    input_bias: bool = False  # on the query, key and value projections
    output_bias: bool = False
    scale: float | None = None  # None: head_width ** -0.5
    softcap: float | None = None  # scores become cap · tanh(score / cap)
    head_norm: HeadNorm | RotatedHeadNorm | None = None
    clip: float | None = None  # projections clamped to ± clip
    temperature: QueryTemperature | ScoreTemperature | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}",
        )
        if isinstance(self.position, Rope):
            self.position.check(self.head_width)


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Checked):
    """Keys and values unfolded from one small vector per token; position in a few entries apart (DeepSeek-V2)."""

    num_heads: int
    query_rank: int | None = None  # None: queries projected straight from the input
    latent_rank: int
    plain_width: int  # query and key entries without position, per head
    rotary_width: int  # query entries with position per head; the key's are shared by all heads
    value_width: int
    rope: Rope
    pattern: AttentionPattern = Causal()
    scale: float | None = None  # None: (plain_width + rotary_width) ** -0.5
    latent_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.rope.width in (None, self.rotary_width),
            f"the rope's width {self.rope.width} must be rotary_width {self.rotary_width}, or None",
        )
        self.rope.check(self.rotary_width)

    @property
    def position(self) -> Rope:
        return self.rope


# --- layers, stacks, model


@dataclass(frozen=True, kw_only=True)
class Layer(Checked):
    """One block. Placement of the norm: see model/block.py."""

    attention: GroupedAttention | LatentAttention
    cross_attention: GroupedAttention | None = None
    feed_forward: FeedForward | Experts
    norm: Norm
    placement: Literal["pre", "post", "sandwich", "parallel"] = "pre"

    def __post_init__(self) -> None:
        super().__post_init__()
        cross = self.cross_attention
        if cross is not None:
            require(self.placement != "parallel", "a parallel layer has no place for cross-attention")
            require(
                isinstance(cross.position, NoPosition) and isinstance(cross.pattern, Bidirectional),
                "cross-attention takes position NoPosition and pattern Bidirectional",
            )


@dataclass(frozen=True, kw_only=True)
class Embedding(Checked):
    MAY_BE_ZERO = ("num_token_types",)

    vocab_size: int
    scale: float = 1.0
    positions: LearnedPositions | SinusoidalPositions | None = None
    num_token_types: int = 0  # segment vectors (BERT)
    norm: Norm | None = None


@dataclass(frozen=True, kw_only=True)
class Stack(Checked):
    """A run of layers over its embedding, and the norm after the last one (None in post-norm models)."""

    embedding: Embedding
    layers: tuple[Layer, ...]
    final_norm: Norm | None = None

    def __post_init__(self) -> None:
        given: object = self.layers
        if isinstance(given, list):
            object.__setattr__(self, "layers", tuple(given))
        super().__post_init__()
        require(len(self.layers) > 0, "a stack needs at least one layer")
        tables = {
            (layer.attention.position, layer.attention.num_heads)
            for layer in self.layers
            if isinstance(layer.attention.position, RelativeBuckets)
        }
        require(len(tables) <= 1, "the layers of a stack share one RelativeBuckets table; they differ here")


@dataclass(frozen=True, kw_only=True)
class HeadTransform(Checked):
    """norm(act(W h + b)) before the vocabulary (BERT)."""

    activation: Activation
    norm: Norm


@dataclass(frozen=True, kw_only=True)
class Head(Checked):
    """Hidden states to logits: cap(transform(h) · Wᵀ · scale + bias). Tied: W is the token table (book C2)."""

    tied: bool = True
    bias: bool = False
    transform: HeadTransform | None = None
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True)
class Dropout(Checked):
    """Probabilities, used in training only."""

    embedding: float = 0.0
    residual: float = 0.0  # on each sublayer's output
    attention: float = 0.0  # on the attention weights
    activation: float = 0.0  # inside the feed-forward

    MAY_BE_ZERO = ("embedding", "residual", "attention", "activation")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in vars(self).items():
            require(0.0 <= value < 1.0, f"Dropout.{name} is {value}; it must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class NormalInitial(Checked):
    """Matrices from N(0, deviation²); the last matrix of each branch divided by √(2L) where residual_scaled."""

    deviation: float = 0.02
    residual_scaled: bool = False


@dataclass(frozen=True, kw_only=True)
class XavierInitial:
    """Matrices uniform in ± √(6 / (rows + columns)) (Glorot & Bengio 2010; book C3)."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Checked):
    """Decoder alone: a language model. Encoder alone: BERT. Both: translation. Head None: hidden states come out."""

    width: int
    context: int  # longest sequence it was made for; a hard limit only with learned positions
    encoder: Stack | None = None
    decoder: Stack | None = None
    head: Head | None = None
    share_embeddings: bool = False  # encoder and decoder read one token table
    pooler: bool = False  # tanh(W h_first + b) for sentence tasks (BERT); see Transformer.pool
    dropout: Dropout = field(default_factory=Dropout)
    initial: NormalInitial | XavierInitial = field(default_factory=NormalInitial)

    def __post_init__(self) -> None:
        super().__post_init__()
        both = self.encoder is not None and self.decoder is not None
        require(self.encoder is not None or self.decoder is not None, "a model needs an encoder or a decoder")
        require(both or not self.share_embeddings, "share_embeddings needs an encoder and a decoder")
        for name, stack, cross in (("encoder", self.encoder, False), ("decoder", self.decoder, both)):
            for number, layer in enumerate(stack.layers if stack else ()):
                require(
                    (layer.cross_attention is not None) == cross,
                    f"{name} layer {number} must {'' if cross else 'not '}have cross_attention here",
                )
        if self.share_embeddings:
            assert self.encoder is not None
            assert self.decoder is not None
            sizes = self.encoder.embedding.vocab_size, self.decoder.embedding.vocab_size
            require(sizes[0] == sizes[1], f"shared embeddings need equal vocabularies, not {sizes}")

    @property
    def output_stack(self) -> Stack:
        """The stack whose hidden states come out."""
        stack = self.decoder or self.encoder
        assert stack is not None
        return stack

    @property
    def vocab_size(self) -> int:
        return self.output_stack.embedding.vocab_size

    @property
    def is_encoder_decoder(self) -> bool:
        return self.encoder is not None and self.decoder is not None
