"""A report as text: the book's tables F2 (a whole sequence) and F3 (one token) with all constants, memory and time.

print_report(cost(preset("gpt2"), phase="decode"), "gpt2")
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from io import StringIO
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clearhead.config import to_dict
from clearhead.costs.calibration import Comparison
from clearhead.costs.formulas import OperationCost, Workload
from clearhead.costs.report import Bound, Report
from clearhead.costs.units import format_amount, format_seconds

TITLES = {
    "train": "one training step, forward and backward",
    "prefill": "prefill of a whole sequence",
    "decode": "one decode step with a KV cache, one token per sequence",
}
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
    "E": "experts",
    "k": "selected experts",
    "R": "latent rank",
    "Rq": "query rank",
    "p": "head width without position",
    "r": "rotary head width",
    "v": "value head width",
}
MEMORY_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits": "logits",
    "cache": "KV cache",
    "cross_cache": "cross-attention KV cache",
}
NUMERIC_HEADINGS = ("FLOPs", "unmasked FLOPs", "bytes", "FLOPs/byte", "predicted", "measured", "ratio")


def print_report(report: Report, title: str, console: Console | None = None) -> None:
    """Print a report: parameters, operations, memory, communication and the bound on the time."""
    console = console or Console()
    workload = report.workload
    active = "" if report.active_parameters == report.total_parameters else f", {report.active_parameters:,} active"
    console.print(f"[bold]{escape(title)}[/bold]: {report.total_parameters:,} parameters{active}")
    console.print("by part: " + "; ".join(f"{part} {count:,}" for part, count in report.parameters.items()))
    console.print(f"\n[bold]{TITLES[workload.phase]}[/bold]\n{describe_workload(workload)}")
    console.print(formula_table(report))
    console.print(legend(report.operations), style="dim")
    console.print()
    console.print(number_table(report))
    console.print(
        "FLOPs: multiplications and additions of matrix products. Unmasked FLOPs: attention counts only the pairs of "
        "query and key that the mask allows. Bytes: every operand read and every result written, once.",
        style="dim",
    )
    console.print()
    if workload.phase == "train":
        print_training(report, console)
    print_memory(report, console)
    if report.communication is not None:
        sent = format_amount(report.communication.bytes_each_way, "B")
        seconds = f", {format_seconds(report.bound.communication_seconds)}" if report.bound else ""
        console.print(
            f"communication of {workload.gpus} GPUs: {report.communication.description}, {sent} each way{seconds}"
        )
    if report.bound is not None:
        print_bound(report.bound, report.workload, console)


def report_html(report: Report) -> str:
    """Return the tables of a report as HTML, for notebooks."""
    console = Console(record=True, file=StringIO(), width=120, highlight=False)
    print_report(report, "cost", console)
    return console.export_html(inline_styles=True, code_format='<pre style="line-height: 1.2">{code}</pre>')


def describe_workload(workload: Workload) -> str:
    source = f", source {workload.source:,}" if workload.config.is_encoder_decoder else ""
    quant = f", weights in {workload.quant}" if workload.quant else ""
    gpus = f", {workload.gpus} GPUs with {workload.parallel}, per GPU:" if workload.gpus > 1 else ""
    return f"batch {workload.batch:,}, context {workload.context:,}{source}, {workload.dtype}{quant}{gpus}"


def legend(operations: Iterable[OperationCost]) -> str:
    """Return the meanings of all symbols that the formulas use."""
    formulas = " ".join(f"{operation.formula} {operation.traffic}" for operation in operations)
    used = set(re.findall("[A-Za-z]+", formulas))
    return ", ".join(f"{symbol} {meaning}" for symbol, meaning in SYMBOLS.items() if symbol in used)


def formula_table(report: Report) -> Table:
    table = plain_table("operation", "FLOPs of one layer, forward", "elements read and written")
    for operation in report.operations:
        table.add_row(label(operation, report), operation.formula, operation.traffic)
    return table


def number_table(report: Report) -> Table:
    headings = ("all layers", "FLOPs", "unmasked FLOPs", "bytes", "FLOPs/byte")
    table = plain_table(*headings, *(["limit"] if report.bound else []))
    for index, operation in enumerate(report.operations):
        limit = [f"{report.bound.limited_by[index]}-bound"] if report.bound else []
        table.add_row(label(operation, report), *number_cells(operation), *limit)
    table.add_row("total", *number_cells(report), style="bold")
    return table


def number_cells(counts: OperationCost | Report) -> list[str]:
    amounts = (format_amount(counts.flops, ""), format_amount(counts.allowed_flops, ""))
    return [*amounts, format_amount(counts.num_bytes, "B"), f"{counts.intensity:.3g}"]


def plain_table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in NUMERIC_HEADINGS else "left", overflow="fold")
    return table


def label(operation: OperationCost, report: Report) -> str:
    """Return the name of an operation, with its stack if the model has two."""
    needs_stack = report.workload.config.is_encoder_decoder and operation.stack != "head"
    return f"{operation.stack} {operation.name}" if needs_stack else operation.name


def print_training(report: Report, console: Console) -> None:
    """Print the FLOPs per token by both conventions, since an MFU has no meaning without its convention."""
    flops = report.model_flops
    console.print(
        f"FLOPs per token for MFU: {format_amount(flops.palm_flops_per_token, '')} (PaLM: 6·P + 12·L·N·H·T, L layers), "
        f"{format_amount(flops.causal_flops_per_token, '')} (attention without masked pairs); "
        f"P = {flops.matrix_parameters:,} weights that multiply a token"
    )
    if report.training_flops is not None and report.training_tokens is not None:
        console.print(
            f"training on {report.training_tokens:,} tokens: {format_amount(report.training_flops, 'FLOP')}, "
            f"6 per token and each of {report.active_parameters:,} parameters"
        )


def print_memory(report: Report, console: Console) -> None:
    sizes = {name: getattr(report.memory, part) for part, name in MEMORY_PARTS.items()}
    console.print("memory: " + ", ".join(f"{name} {format_amount(size, 'B')}" for name, size in sizes.items() if size))
    console.print(f"peak memory: {format_amount(report.memory.peak, 'B')}")
    if report.cache_bytes_per_token and report.workload.phase != "train":
        console.print(f"KV cache: {report.cache_bytes_per_token:,} bytes per token")


def print_bound(bound: Bound, workload: Workload, console: Console) -> None:
    console.print(
        f"\non {bound.device} ({escape(bound.source)})\n"
        f"at least {format_seconds(bound.seconds)}: operations are compute-bound above {bound.balance:.3g} FLOPs/byte "
        "and memory-bound below"
    )
    rate = f"{bound.tokens_per_second:,.4g} tokens/s"
    if bound.predicted_seconds is None:
        console.print(f"at most {rate}")
    else:
        console.print(f"predicted from measured rates: {format_seconds(bound.predicted_seconds)}, {rate}")
    length = "source" if workload.encodes_source else "context"
    console.print(
        f"fits in memory: batch {bound.largest_batch:,} at this {length}, or {length} {bound.largest_context:,} "
        "at this batch"
    )


FORMATS: dict[str, Callable[[float], str]] = {
    "FLOPs": partial(format_amount, unit=""),
    "bytes moved": partial(format_amount, unit="B"),
    "peak bytes": partial(format_amount, unit="B"),
    "seconds": format_seconds,
}


def print_comparisons(comparisons: Sequence[Comparison], device: str, console: Console | None = None) -> None:
    """Print predictions and measurements of this machine with their ratios."""
    console = console or Console()
    table = plain_table(f"on this machine's {device}", "predicted", "measured", "ratio")
    for comparison in comparisons:
        show = FORMATS[comparison.quantity]
        values = (show(comparison.predicted), show(comparison.measured), f"{comparison.ratio:.3f}")
        table.add_row(comparison.quantity, *values)
    console.print()
    console.print(table)
    if all(comparison.quantity != "seconds" for comparison in comparisons):
        console.print(f"to predict seconds in this precision, run: clearhead calibrate --device {device}")


def report_to_dict(report: Report) -> dict[str, Any]:
    """Return a report with its totals as JSON data."""
    data = asdict(report) | {
        "total_parameters": report.total_parameters,
        "flops": report.flops,
        "allowed_flops": report.allowed_flops,
        "num_bytes": report.num_bytes,
        "intensity": report.intensity,
    }
    data["workload"]["config"] = to_dict(report.workload.config)
    for operation, operation_data in zip(report.operations, data["operations"], strict=True):
        operation_data["intensity"] = operation.intensity
    return data
