"""Position encodings. model/positions.py computes them.

    Rope(theta=5e5, scaling=LinearScaling(factor=8.0))

A model can add positions to its embeddings (LearnedPositions, SinusoidalPositions) or use them inside attention
(`Position`): rotate queries and keys, or add a term to the scores.
"""

import math
from dataclasses import dataclass
from typing import Literal

from clearhead.architecture.norms import LayerNorm
from clearhead.config import CheckedConfig
from clearhead.errors import require

# --- added to the embeddings


@dataclass(frozen=True, kw_only=True)
class LearnedPositions(CheckedConfig):
    """One learned vector per position. The table starts with `offset` unused rows (2 in BART)."""

    MAY_BE_ZERO = ("offset",)

    num_positions: int
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class SinusoidalPositions(CheckedConfig):
    """Fixed sines and cosines of position / 10000^(2k/D) (Vaswani et al. 2017, §3.5).

    `interleaved`: sines and cosines alternate (the paper). `halves`: all sines, then all cosines (Marian,
    Transformer-XL). `halves_to_end`: halves with exponent k / (D/2 - 1), so that the last frequency is 1/10000
    (tensor2tensor).
    """

    MAY_BE_ZERO = ("offset",)

    layout: Literal["interleaved", "halves", "halves_to_end"] = "interleaved"
    offset: int = 0  # added to each position (2 in XGLM)


# --- used inside attention


@dataclass(frozen=True, kw_only=True)
class LinearScaling(CheckedConfig):
    """Divide all rotary frequencies by `factor` (position interpolation, Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class DynamicScaling(CheckedConfig):
    """Lower the rotary frequencies with the sequence length, once it exceeds `original_context` ("NTK-aware")."""

    factor: float
    original_context: int


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(CheckedConfig):
    """Divide low rotary frequencies by `factor`, keep high ones, and blend linearly in between (Llama 3.1)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int


_MAX_ROTATIONS = 1e9


@dataclass(frozen=True, kw_only=True)
class YarnScaling(CheckedConfig):
    """YaRN (Peng et al. 2023). `attention_factor` multiplies cosine and sine."""

    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta_fast", "beta_slow"):  # numbers of rotations, of which the logarithm is taken
            number, limit = getattr(self, name), _MAX_ROTATIONS
            require(
                1 / limit <= number <= limit,
                f"YarnScaling.{name} is {number}; it must be from {1 / limit:g} to {limit:g}",
            )


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling(CheckedConfig):
    """LongRoPE (Ding et al. 2024): divide each rotary frequency by its own factor; `attention_factor` as in YaRN.

    The short factors are used up to `original_context` tokens, the long factors for longer texts.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_context: int
    attention_factor: float

    def __post_init__(self) -> None:
        for name in ("short_factors", "long_factors"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        super().__post_init__()
        factors = self.short_factors + self.long_factors
        require(
            all(0 < factor < math.inf for factor in factors) and len(self.short_factors) == len(self.long_factors),
            "LongRopeScaling needs as many short_factors as long_factors, all finite and greater than 0",
        )


Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, kw_only=True)
class Rope(CheckedConfig):
    """Rotary positions (Su et al. 2021): rotate pairs of query and key entries by position · theta^(-2j/width).

    Pairs are (j, j + width/2) with `half` and (2j, 2j + 1) with `interleaved`.
    """

    theta: float = 10000.0
    width: int | None = None  # rotated entries of each head; None: all
    pairing: Literal["half", "interleaved"] = "half"
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.theta > 1, f"Rope.theta is {self.theta}; it must be greater than 1, so that frequencies decrease")

    def check_head_width(self, head_width: int) -> None:
        """Raise ClearheadError if this Rope cannot rotate heads with `head_width` entries."""
        width = self.width or head_width
        require(
            width % 2 == 0 and width <= head_width,
            f"Rope rotates pairs of entries; its width {width} must be even and at most the head width {head_width}",
        )
        require(
            width > 2 or not isinstance(self.scaling, DynamicScaling),
            "DynamicScaling leaves the first pair unchanged; it needs a Rope with a width of at least 4, not 2",
        )
        if isinstance(self.scaling, LongRopeScaling):
            require(
                len(self.scaling.short_factors) == width // 2,
                f"LongRopeScaling has {len(self.scaling.short_factors)} factors; a Rope of width {width} needs "
                f"{width // 2}",
            )

    @property
    def depends_on_length(self) -> bool:
        """Whether the angle of a token depends on the length of the whole text."""
        return isinstance(self.scaling, DynamicScaling | LongRopeScaling)


@dataclass(frozen=True, kw_only=True)
class RelativeBuckets(CheckedConfig):
    """Add one learned number per head and bucket of key - query distance to the scores (T5).

    All layers of a stack share one table, or each has its own (UMT5).
    """

    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = False
    per_layer: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        buckets_per_exact = 4 if self.bidirectional else 2
        exact = self.num_buckets // buckets_per_exact
        require(
            exact >= 1,
            f"RelativeBuckets.num_buckets is {self.num_buckets}; it must be at least {buckets_per_exact}",
        )
        require(
            self.max_distance > exact,
            f"RelativeBuckets.max_distance is {self.max_distance}; it must be greater than {exact}, "
            "the number of exact buckets",
        )


@dataclass(frozen=True, kw_only=True)
class Alibi(CheckedConfig):
    """Subtract slope · distance from the scores, with one fixed slope per head (Press et al. 2021)."""

    max_bias: float = 8.0


@dataclass(frozen=True, kw_only=True)
class RelativeSinusoid:
    """Transformer-XL (Dai et al. 2019, §3.3): (q + u)·k + (q + v)·W_r R(i - j), with learned u, v and W_r."""


@dataclass(frozen=True, kw_only=True)
class Disentangled(CheckedConfig):
    """Add scores of queries and keys with encoded distances (DeBERTa, He et al. 2021); see model/disentangled.py.

    A table of 2 · num_buckets rows, which all layers share, encodes distances up to max_distance.
    """

    num_buckets: int
    max_distance: int
    norm: LayerNorm

    def __post_init__(self) -> None:
        super().__post_init__()
        half = self.num_buckets // 2
        require(half >= 1, f"Disentangled.num_buckets is {self.num_buckets}; it must be at least 2")
        require(
            self.max_distance > half + 1,
            f"Disentangled.max_distance is {self.max_distance}; it must be greater than {half + 1}",
        )


@dataclass(frozen=True, kw_only=True)
class NoPosition:
    """Attention without positions. A causal mask still carries some information about order (book B4)."""


Position = Rope | RelativeBuckets | Alibi | RelativeSinusoid | Disentangled | NoPosition
