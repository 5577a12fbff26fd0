"""The small parts a config is made of: norms, positions, and which keys a query may see.

Rope(theta=5e5, scaling=LinearScaling(factor=8.0))
"""

from dataclasses import dataclass
from typing import Literal

from clearhead.config import Checked
from clearhead.errors import require

# --- norms


@dataclass(frozen=True, kw_only=True)
class RmsNorm(Checked):
    """x / sqrt(mean(x²) + epsilon) · weight (Zhang & Sennrich 2019)."""

    epsilon: float
    unit_offset: bool = False  # weight is stored as its distance from 1 (Gemma)
    scale_in_float32: bool = False  # in half precision: multiply by the weight before rounding (Gemma, Grok)


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Checked):
    """(x - mean) / sqrt(variance + epsilon) · weight + bias (Ba et al. 2016)."""

    epsilon: float
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class DeviationNorm(Checked):
    """(x - mean) / (deviation + epsilon) · weight + bias, the unbiased deviation (Annotated Transformer)."""

    epsilon: float


Norm = RmsNorm | LayerNorm | DeviationNorm


# --- positions given with the embedding


@dataclass(frozen=True, kw_only=True)
class LearnedPositions(Checked):
    """One trained vector per position; `offset` unused rows stand first (2 in BART)."""

    MAY_BE_ZERO = ("offset",)

    num_positions: int
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class SinusoidalPositions(Checked):
    """Fixed sines and cosines of position / 10000^(2k/D) (Vaswani et al. 2017, §3.5).

    `interleaved`: sin, cos alternate (the paper); `halves`: all sines, then all cosines (Marian, Transformer-XL);
    `halves_to_end`: halves with exponent k / (D/2 - 1), so that the last frequency is 1/10000 (tensor2tensor).
    """

    layout: Literal["interleaved", "halves", "halves_to_end"] = "interleaved"


# --- positions given inside attention


@dataclass(frozen=True, kw_only=True)
class LinearScaling(Checked):
    factor: float


@dataclass(frozen=True, kw_only=True)
class DynamicScaling(Checked):
    """Frequencies stretched by the length at hand, beyond `original_context` only ("NTK-aware")."""

    factor: float
    original_context: int


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(Checked):
    """Long waves divided by `factor`, short ones kept, a linear blend between."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling(Checked):
    """YaRN (Peng et al. 2023); `attention_factor` multiplies cosine and sine."""

    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class Rope(Checked):
    """Rotary positions (Su et al. 2021): pairs of q and k entries turned by position · theta^(-2j/width).

    Pairs are (j, j + width/2) with `half`, (2j, 2j + 1) with `interleaved`.
    """

    theta: float = 10000.0
    width: int | None = None  # rotated entries of each head; None: all
    pairing: Literal["half", "interleaved"] = "half"
    scaling: LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.theta > 1, f"Rope.theta is {self.theta}; frequencies fall only if it exceeds 1")

    def check(self, entries: int) -> None:
        """Whether it can turn the pairs among this many entries of a head."""
        width = self.width or entries
        require(
            width % 2 == 0 and width <= entries,
            f"Rope turns pairs: its width {width} must be even and at most the {entries} entries of a head",
        )
        require(
            width > 2 or not isinstance(self.scaling, DynamicScaling),
            "DynamicScaling keeps the first pair as it is; a Rope of width 2 has no other",
        )


@dataclass(frozen=True, kw_only=True)
class RelativeBuckets(Checked):
    """One learned number per head and bucket of key - query distance, shared by the layers of a stack (T5)."""

    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        exact = self.num_buckets // (4 if self.bidirectional else 2)
        require(exact >= 1, f"RelativeBuckets.num_buckets is {self.num_buckets}; too few to hold a distance")
        require(
            self.max_distance > exact,
            f"RelativeBuckets.max_distance is {self.max_distance}; it must exceed the {exact} exact buckets",
        )


@dataclass(frozen=True, kw_only=True)
class Alibi(Checked):
    """Score minus slope · distance, one fixed slope per head (Press et al. 2021)."""

    max_bias: float = 8.0


@dataclass(frozen=True, kw_only=True)
class RelativeSinusoid:
    """Transformer-XL (Dai et al. 2019, §3.3): (q + u)·k + (q + v)·W_r R(i - j), with u, v and W_r learned."""


@dataclass(frozen=True, kw_only=True)
class NoPosition:
    """The layer is told no position; a causal mask alone still lets it count (book B4)."""


Position = Rope | RelativeBuckets | Alibi | RelativeSinusoid | NoPosition


# --- which keys a query may see


@dataclass(frozen=True, kw_only=True)
class Bidirectional:
    """Both ways: encoders and cross-attention."""


@dataclass(frozen=True, kw_only=True)
class Causal:
    """Itself and all before."""


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(Checked):
    """Itself and the size - 1 tokens before."""

    size: int


@dataclass(frozen=True, kw_only=True)
class Chunked(Checked):
    """Itself and those before in the same chunk of `size` tokens (Llama 4)."""

    size: int


AttentionPattern = Bidirectional | Causal | SlidingWindow | Chunked
