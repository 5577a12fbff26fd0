"""One matrix product, or several that are told as one row of the book's tables, as numbers.

linear("head", Size("B·T", 1024), Size("D", 768), Size("V", 50257)).formula   # 2·B·T·D·V

Symbols are the shape alphabet of model/__init__.py; beside it r is the rotary width of latent attention, p the plain
one, v that of its values, Rq the rank of its queries, and k the number of experts chosen.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Size(NamedTuple):
    symbol: str
    number: int


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Of one layer; `times` layers are alike. FLOPs are of the forward, sizes are numbers, not bytes."""

    name: str
    formula: str  # of the FLOPs
    traffic: str  # of the numbers read and written
    flops: int
    allowed_flops: int | None = None  # None: all of them
    weights: int = 0
    active_weights: int | None = None  # that one token uses; None: all of them
    inputs: int = 0
    outputs: int = 0
    scores: int = 0  # entries of the score matrix, which only an unfused kernel writes and reads
    backward: int = 2  # FLOPs of the backward are this many times the forward's
    stack: str = ""
    times: int = 1

    @property
    def needed_flops(self) -> int:
        return self.flops if self.allowed_flops is None else self.allowed_flops

    @property
    def used_weights(self) -> int:
        return self.weights if self.active_weights is None else self.active_weights


def linear(name: str, tokens: Size, inputs: Size, outputs: Size, num_matrices: int = 1) -> Operation:
    """tokens · (inputs -> outputs); `num_matrices` heads, each with a matrix of its own, share the tokens."""
    ends = f"({inputs.symbol} + {outputs.symbol})"
    product = f"{bracketed(inputs.symbol)}·{bracketed(outputs.symbol)}"
    return Operation(
        name=name,
        formula=f"2·{tokens.symbol}·{product}",
        traffic=f"{'N·' if num_matrices > 1 else ''}{product} + {tokens.symbol}·{ends}",
        flops=2 * tokens.number * inputs.number * outputs.number,
        weights=num_matrices * inputs.number * outputs.number,
        inputs=tokens.number * inputs.number,
        outputs=tokens.number * outputs.number,
    )


def bracketed(symbol: str) -> str:
    """A bare sum needs brackets to be multiplied."""
    return f"({symbol})" if " + " in symbol and "(" not in symbol else symbol
