"""One matrix product as numbers and as a formula, as in the rows of the book's tables F2 and F3.

    linear_operation("head", Size("B·T", 1024), Size("D", 768), Size("V", 50257)).formula   # 2·B·T·D·V

Symbols follow the shape alphabet of model/__init__.py. In addition, for latent attention, r is the rotary width of a
head, p the width without position, v the width of its values and Rq the rank of the queries; k is the number of experts
that the router selects.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Size(NamedTuple):
    """A dimension: its symbol in formulas and its value."""

    symbol: str
    number: int


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One matrix product of one layer, or several that form one row of a table; FLOPs are those of the forward.

    Sizes count elements, not bytes.
    """

    name: str
    formula: str  # FLOPs
    traffic: str  # elements read and written
    flops: int  # attention: all pairs of queries and keys that the kernel receives
    allowed_flops: int  # attention: only the pairs that the mask allows
    weights: int = 0
    active_weights: int = 0  # weights that one token uses: of a mixture, the selected experts
    inputs: int = 0
    outputs: int = 0
    scores: int = 0  # elements of the score matrix, if the kernel is not fused and writes or reads it
    fused_scores: int = 0  # the same elements, if a fused kernel does not move them
    backward_factor: int = 2  # FLOPs of the backward are this multiple of the forward
    stack: str = ""
    num_layers: int = 1  # equal layers


def linear_operation(name: str, tokens: Size, inputs: Size, outputs: Size, num_matrices: int = 1) -> Operation:
    """Return the product of tokens with a matrix (inputs -> outputs).

    num_matrices: heads that have a matrix each and share the tokens among them.
    """
    product = f"{_parenthesize(inputs.symbol)}·{_parenthesize(outputs.symbol)}"
    flops = 2 * tokens.number * inputs.number * outputs.number
    weights = num_matrices * inputs.number * outputs.number
    return Operation(
        name=name,
        formula=f"2·{tokens.symbol}·{product}",
        traffic=f"{'N·' if num_matrices > 1 else ''}{product} + {tokens.symbol}·({inputs.symbol} + {outputs.symbol})",
        flops=flops,
        allowed_flops=flops,
        weights=weights,
        active_weights=weights,
        inputs=tokens.number * inputs.number,
        outputs=tokens.number * outputs.number,
    )


def _parenthesize(symbol: str) -> str:
    """Put a bare sum into parentheses, so that it can be a factor."""
    return f"({symbol})" if " + " in symbol and "(" not in symbol else symbol
