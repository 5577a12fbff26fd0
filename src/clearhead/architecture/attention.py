"""Configs of the attention layers: grouped and latent attention.

GroupedAttention(num_heads=32, num_kv_heads=8, head_width=128, position=Rope(theta=5e5))
"""

from dataclasses import dataclass
from typing import Literal

from clearhead.architecture.norms import LayerNorm, RmsNorm
from clearhead.architecture.patterns import AttentionPattern, Causal
from clearhead.architecture.positions import NoPosition, Position, Rope
from clearhead.config import CheckedConfig
from clearhead.errors import require


@dataclass(frozen=True, kw_only=True)
class HeadNorm(CheckedConfig):
    """Norm of the queries and keys with learned weights, before or after the rotation (Qwen 3, Gemma 3, Cohere).

    `shared`: each head is normalized, and all heads have the same weight. `per_head`: each head is normalized and has
    its own weight (Cohere, StableLM). `joint`: all heads are normalized together, as one vector (OLMo 2).
    """

    norm: RmsNorm | LayerNorm
    scope: Literal["shared", "per_head", "joint"] = "shared"
    after_rotation: bool = False  # Hunyuan

    def __post_init__(self) -> None:
        super().__post_init__()
        own_weights = isinstance(self.norm, LayerNorm) and (self.norm.bias or not self.norm.weight)
        require(
            self.scope != "per_head" or not (own_weights or self.norm.unit_offset),
            "a HeadNorm with scope 'per_head' needs a norm with a weight, without a bias and without unit_offset",
        )
        require(
            self.scope != "joint" or not self.after_rotation,
            "a HeadNorm with scope 'joint' comes before the rotation; set after_rotation to false",
        )


@dataclass(frozen=True, kw_only=True)
class RotatedHeadNorm(CheckedConfig):
    """RMS norm of each query and key head without a weight, after the rotation (Llama 4)."""

    epsilon: float


@dataclass(frozen=True, kw_only=True)
class QueryTemperature(CheckedConfig):
    """Multiply the query at index t by 1 + scale · ln(1 + floor((t + 1) / floor)) (Llama 4)."""

    floor: int
    scale: float


@dataclass(frozen=True, kw_only=True)
class ScoreTemperature(CheckedConfig):
    """Multiply the capped scores by log2(t) / log2(length) where the query index t exceeds length (Grok 2)."""

    length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.length > 1,
            f"ScoreTemperature.length is {self.length}; it must be at least 2, so that its logarithm is positive",
        )


@dataclass(frozen=True, kw_only=True)
class GroupedAttention(CheckedConfig):
    """Attention with num_heads query heads that share num_kv_heads key-value heads (book A1-A7, A10).

    Equal numbers are multi-head attention, one key-value head is multi-query, anything between is grouped-query.
    """

    num_heads: int
    num_kv_heads: int
    head_width: int
    value_width: int | None = None  # None: head_width
    position: Position = NoPosition()
    pattern: AttentionPattern = Causal()
    input_bias: bool = False  # on the query, key and value projections
    key_bias: bool = True  # False: not on the key projection (Whisper); it adds the same to all scores of a query
    output_bias: bool = False
    scale: float | None = None  # None: head_width ** -0.5
    softcap: float | None = None  # scores become softcap · tanh(score / softcap)
    head_norm: HeadNorm | RotatedHeadNorm | None = None
    clip: float | None = None  # clamp queries, keys and values to ± clip
    temperature: QueryTemperature | ScoreTemperature | None = None
    sinks: bool = False  # a learned score per head joins the softmax and is then dropped (gpt-oss)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads is {self.num_heads}; it must be a multiple of num_kv_heads {self.num_kv_heads}",
        )
        require(self.input_bias or self.key_bias, "key_bias=False needs input_bias; without it there is no bias at all")
        if isinstance(self.position, Rope):
            self.position.check_head_width(self.head_width)
        else:
            require(
                not isinstance(self.head_norm, HeadNorm) or not self.head_norm.after_rotation,
                f"{type(self.position).__name__} rotates nothing; set after_rotation of the HeadNorm to false",
            )


@dataclass(frozen=True, kw_only=True)
class LatentAttention(CheckedConfig):
    """Multi-head latent attention (DeepSeek-V2): keys and values are unfolded from one small vector per token.

    Positions are rotated into a few separate entries of queries and keys.
    """

    num_heads: int
    query_rank: int | None = None  # None: queries are projected directly from the input
    latent_rank: int
    plain_width: int  # query and key entries without position, per head
    rotary_width: int  # query entries with position, per head; all heads share those of the key
    value_width: int
    rope: Rope
    pattern: AttentionPattern = Causal()
    scale: float | None = None  # None: (plain_width + rotary_width) ** -0.5
    latent_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.rope.width in (None, self.rotary_width),
            f"rope.width is {self.rope.width}; it must be None or rotary_width {self.rotary_width}",
        )
        self.rope.check_head_width(self.rotary_width)

    @property
    def position(self) -> Rope:
        """The rope, under the name that GroupedAttention has for it."""
        return self.rope
