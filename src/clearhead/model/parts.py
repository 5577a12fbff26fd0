"""The small parts a config is made of: norms, positions, and which keys a query may see.

Rope(theta=5e5, scaling=LinearScaling(factor=8.0))
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args, get_type_hints

from clearhead.errors import ClearheadError, unknown


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ClearheadError(sentence)


def require_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not 0 < value < math.inf:
            raise ClearheadError(f"{type(owner).__name__}.{name} is {value}; it must be finite and greater than 0")


class Part:
    """Base of all configs: a choice is one of its choices; a number is finite and above 0, or 0 where it may be."""

    MAY_BE_ZERO: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, str):
                choices = get_args(get_type_hints(type(self))[name])
                if choices and value not in choices:
                    raise unknown(f"{type(self).__name__}.{name}", value, choices)
            elif name in self.MAY_BE_ZERO and value is not None:
                require(0 <= value < math.inf, f"{type(self).__name__}.{name} is {value}; it must be 0 or more")
            elif type(value) in (int, float):
                require_positive(self, name)


# --- norms


@dataclass(frozen=True, kw_only=True)
class RmsNorm(Part):
    """x / sqrt(mean(x²) + epsilon) · weight (Zhang & Sennrich 2019)."""

    epsilon: float
    unit_offset: bool = False  # weight is stored as its distance from 1 (Gemma)
    scale_in_float32: bool = False  # in half precision: multiply by the weight before rounding (Gemma, Grok)


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Part):
    """(x - mean) / sqrt(variance + epsilon) · weight + bias (Ba et al. 2016)."""

    epsilon: float
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class DeviationNorm(Part):
    """(x - mean) / (deviation + epsilon) · weight + bias, the unbiased deviation (Annotated Transformer)."""

    epsilon: float


Norm = RmsNorm | LayerNorm | DeviationNorm


# --- positions given with the embedding


@dataclass(frozen=True, kw_only=True)
class LearnedPositions(Part):
    """One trained vector per position; `offset` unused rows stand first (2 in BART)."""

    MAY_BE_ZERO = ("offset",)

    num_positions: int
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class SinusoidalPositions(Part):
    """Fixed sines and cosines of position / 10000^(2k/D) (Vaswani et al. 2017, §3.5).

    `interleaved`: sin, cos alternate (the paper); `halves`: all sines, then all cosines (Marian, Transformer-XL);
    `halves_to_end`: halves with exponent k / (D/2 - 1), so that the last frequency is 1/10000 (tensor2tensor).
    """

    layout: Literal["interleaved", "halves", "halves_to_end"] = "interleaved"


# --- positions given inside attention


@dataclass(frozen=True, kw_only=True)
class LinearScaling(Part):
    factor: float


@dataclass(frozen=True, kw_only=True)
class DynamicScaling(Part):
    """Frequencies stretched by the length at hand, beyond `original_context` only ("NTK-aware")."""

    factor: float
    original_context: int


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(Part):
    """Long waves divided by `factor`, short ones kept, a linear blend between."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling(Part):
    """YaRN (Peng et al. 2023); `attention_factor` multiplies cosine and sine."""

    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class Rope(Part):
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
class RelativeBuckets(Part):
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
class Alibi(Part):
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
class Everything:
    """Both ways: encoders and cross-attention."""


@dataclass(frozen=True, kw_only=True)
class Causal:
    """Itself and all before."""


@dataclass(frozen=True, kw_only=True)
class Window(Part):
    """Itself and the size - 1 tokens before."""

    size: int


@dataclass(frozen=True, kw_only=True)
class Chunk(Part):
    """Itself and those before in the same chunk of `size` tokens (Llama 4)."""

    size: int


Reach = Everything | Causal | Window | Chunk
