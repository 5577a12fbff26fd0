"""Tables of operations and of comparisons, for people to read.

console.print(formula_table(operations, has_two_stacks=False)); console.print(legend(operations))
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from clearhead.costs.calibration import Comparison
from clearhead.costs.formulas import OperationCost
from clearhead.costs.units import format_amount, format_seconds
from clearhead.terminal import TerminalConsole

# The shape alphabet of model/__init__.py and the additions of matrix_products.py.
SYMBOLS = {
    "B": "batch",
    "T": "query tokens",
    "S": "key tokens",
    "D": "width",
    "N": "heads",
    "K": "key-value heads",
    "H": "head width",
    "F": "feed-forward width",
    "V": "vocabulary",
    "M": "mel bands",
    "E": "experts",
    "k": "selected experts",
    "R": "latent rank",
    "Rq": "query rank",
    "p": "head width without position",
    "r": "rotary head width",
    "v": "value head width",
}
_NUMERIC_HEADINGS = ("FLOPs", "FLOPs with mask", "bytes", "FLOPs/byte", "predicted", "measured", "ratio")


def legend(operations: Iterable[OperationCost]) -> str:
    """Return the meanings of all symbols that the formulas use."""
    formulas = " ".join(f"{operation.formula} {operation.traffic}" for operation in operations)
    used = set(re.findall("[A-Za-z]+", formulas))
    return ", ".join(f"{symbol} {meaning}" for symbol, meaning in SYMBOLS.items() if symbol in used)


def formula_table(operations: Iterable[OperationCost], has_two_stacks: bool) -> Table:
    """Return the table of FLOPs and traffic as formulas."""
    table = _plain_table("operation", "FLOPs of one layer, forward", "elements read and written")
    for operation in operations:
        table.add_row(label(operation, has_two_stacks), operation.formula, operation.traffic)
    return table


def number_table(
    operations: Sequence[OperationCost], has_two_stacks: bool, limited_by: Sequence[str] | None = None
) -> Table:
    """Return the table of FLOPs, bytes and their ratio with a total; limited_by: "compute" or "memory", one each."""
    headings = ("all layers", "FLOPs", "FLOPs with mask", "bytes", "FLOPs/byte")
    table = _plain_table(*headings, *([] if limited_by is None else ["limit"]))
    for index, operation in enumerate(operations):
        limit = [] if limited_by is None else [f"{limited_by[index]}-bound"]
        table.add_row(label(operation, has_two_stacks), *_number_cells(operation), *limit)
    flops, allowed_flops = (sum(getattr(one, name) for one in operations) for name in ("flops", "allowed_flops"))
    total = OperationCost("", "total", "", "", flops, allowed_flops, sum(one.num_bytes for one in operations))
    table.add_row(total.name, *_number_cells(total), style="bold")
    return table


def _number_cells(operation: OperationCost) -> list[str]:
    amounts = (format_amount(operation.flops, ""), format_amount(operation.allowed_flops, ""))
    return [*amounts, format_amount(operation.num_bytes, "B"), f"{operation.intensity:.3g}"]


def _plain_table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in _NUMERIC_HEADINGS else "left", overflow="fold")
    return table


def label(operation: OperationCost, has_two_stacks: bool) -> str:
    """Return the name of an operation, with its stack if the model has two."""
    needs_stack = has_two_stacks and operation.stack != "head"
    return f"{operation.stack} {operation.name}" if needs_stack else operation.name


FORMATS: dict[str, Callable[[float], str]] = {
    "FLOPs": partial(format_amount, unit=""),
    "bytes moved": partial(format_amount, unit="B"),
    "peak bytes": partial(format_amount, unit="B"),
    "seconds": format_seconds,
}


def print_comparisons(comparisons: Sequence[Comparison], device: str, console: Console | None = None) -> None:
    """Print predictions and measurements of this machine with their ratios."""
    console = console or TerminalConsole()
    table = _plain_table(f"on this machine's {device}", "predicted", "measured", "ratio")
    for comparison in comparisons:
        show = FORMATS[comparison.quantity]
        values = (show(comparison.predicted), show(comparison.measured), f"{comparison.ratio:.3f}")
        table.add_row(comparison.quantity, *values)
    console.print()
    console.print(table)
    if all(comparison.quantity != "seconds" for comparison in comparisons):
        console.print(f"to predict seconds in this precision, run: clearhead calibrate --device {device}")
