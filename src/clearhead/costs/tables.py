"""A report for people to read: the book's tables F2 (a whole sequence) and F3 (one token) with their constants.

print_report(cost(preset("gpt2"), phase="decode"), "gpt2")
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clearhead.config import to_dict
from clearhead.costs.calibration.compare import Comparison
from clearhead.costs.formulas.workload import Workload
from clearhead.costs.report import Bound, Report, Row

TITLES = {
    "train": "one training step, forward and backward",
    "prefill": "a whole sequence",
    "decode": "one decoded token of each row, with cache",
}
# model/__init__.py and product.py
SYMBOLS = {
    "B": "batch rows",
    "T": "tokens read",
    "S": "tokens looked at",
    "D": "width",
    "N": "heads",
    "K": "key-value heads",
    "H": "head width",
    "F": "feed-forward width",
    "V": "vocabulary",
    "E": "experts",
    "k": "experts chosen",
    "R": "latent rank",
    "Rq": "rank of queries",
    "p": "plain head width",
    "r": "rotary head width",
    "v": "value head width",
}


def amount(number: float, unit: str) -> str:
    """1.6e10, "B" -> 16 GB."""
    for prefix, size in (("Z", 1e21), ("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {prefix}{unit}"
    return f"{number:.4g} {unit}"


def duration(seconds: float) -> str:
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if seconds >= size), ("µs", 1e-6))
    return f"{seconds / size:.4g} {unit}"


def print_report(report: Report, title: str, console: Console | None = None) -> None:
    console = console or Console()
    workload = report.workload
    active = "" if report.active_parameters == report.total_parameters else f", {report.active_parameters:,} active"
    console.print(f"[bold]{escape(title)}[/bold]: {report.total_parameters:,} parameters{active}")
    console.print("by part: " + "; ".join(f"{part} {count:,}" for part, count in report.parameters.items()))
    console.print(f"\n[bold]{TITLES[workload.phase]}[/bold]\n{sizes(workload)}")
    console.print(formula_table(report))
    console.print(legend(report.rows), style="dim")
    console.print()
    console.print(number_table(report))
    console.print(
        "FLOPs: multiplications and additions of matrix products. By the mask: only of tokens that may look at each "
        "other. Bytes: every operand read and every result written, once.",
        style="dim",
    )
    console.print()
    if workload.phase == "train":
        print_training(report, console)
    print_memory(report, console)
    if report.communication is not None:
        sent = report.communication
        took = f", {duration(report.bound.communication_seconds)}" if report.bound else ""
        console.print(f"between {workload.gpus} GPUs: {sent.what}, {amount(sent.bytes_each_way, 'B')} each way{took}")
    if report.bound is not None:
        print_bound(report.bound, report.workload, console)


def sizes(workload: Workload) -> str:
    source = f", source {workload.source:,}" if workload.config.is_encoder_decoder else ""
    quant = f", weights {workload.quant}" if workload.quant else ""
    gpus = f", {workload.gpus} GPUs by {workload.parallel}, each:" if workload.gpus > 1 else ""
    return f"batch {workload.batch:,}, context {workload.context:,}{source}, {workload.dtype}{quant}{gpus}"


def legend(rows: Iterable[Row]) -> str:
    used = {symbol for row in rows for symbol in re.findall("[A-Za-z]+", f"{row.formula} {row.traffic}")}
    return ", ".join(f"{symbol} {words}" for symbol, words in SYMBOLS.items() if symbol in used)


def formula_table(report: Report) -> Table:
    table = plain_table("operation", "FLOPs of one layer, forward", "numbers it reads and writes")
    for row in report.rows:
        table.add_row(name_of(row, report), row.formula, row.traffic)
    return table


def number_table(report: Report) -> Table:
    sides = report.bound.sides if report.bound else None
    headings = ("in all layers", "FLOPs", "by the mask", "bytes", "FLOPs/byte")
    table = plain_table(*headings, *(["bound by"] if sides else []))
    for number, row in enumerate(report.rows):
        numbers = (amount(row.flops, ""), amount(row.allowed_flops, ""), amount(row.num_bytes, "B"))
        side = [sides[number]] if sides else []
        table.add_row(name_of(row, report), *numbers, f"{row.intensity:.3g}", *side)
    total = (amount(report.flops, ""), amount(report.allowed_flops, ""), amount(report.num_bytes, "B"))
    table.add_row("total", *total, f"{report.intensity:.3g}", style="bold")
    return table


def plain_table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        numeric = heading in ("FLOPs", "by the mask", "bytes", "FLOPs/byte", "predicted", "measured", "ratio")
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    return table


def name_of(row: Row, report: Report) -> str:
    return f"{row.stack} {row.name}" if report.workload.config.is_encoder_decoder and row.stack != "head" else row.name


def print_training(report: Report, console: Console) -> None:
    """Both conventions by name, since a utilisation means nothing without one."""
    use = report.utilization
    console.print(
        f"for MFU, FLOPs of a token: {amount(use.palm_flops_per_token, '')} (PaLM: 6·P + 12·L·N·H·T, L layers), "
        f"{amount(use.causal_flops_per_token, '')} (attention as the mask allows); "
        f"P = {use.matrix_parameters:,} weights that a token is multiplied by"
    )
    if report.training_flops is not None and report.training_tokens is not None:
        console.print(
            f"whole training of {report.training_tokens:,} tokens: {amount(report.training_flops, 'FLOP')}, "
            f"6 for each token and each of {report.active_parameters:,} parameters"
        )


def print_memory(report: Report, console: Console) -> None:
    parts = {name.replace("_", " "): size for name, size in asdict(report.memory).items() if name != "peak" and size}
    console.print("memory: " + ", ".join(f"{name} {amount(size, 'B')}" for name, size in parts.items()))
    console.print(f"memory at the highest moment: {amount(report.memory.peak, 'B')}")
    if report.cache_bytes_per_token and report.workload.phase != "train":
        console.print(f"cache: {report.cache_bytes_per_token:,} bytes for each token")


def print_bound(bound: Bound, workload: Workload, console: Console) -> None:
    console.print(
        f"\non {bound.device} ({escape(bound.source)})\n"
        f"at least {duration(bound.seconds)}: each operation takes the longer of its FLOPs and its bytes, "
        f"which are equal at {bound.balance:.3g} FLOPs/byte"
    )
    rate = f"{bound.tokens_per_second:,.4g} tokens/s"
    if bound.predicted_seconds is None:
        console.print(f"at most {rate}")
    else:
        console.print(f"predicted by what was measured here: {duration(bound.predicted_seconds)}, {rate}")
    read = "source" if workload.reads_source else "context"
    console.print(
        f"fits its memory: batch {bound.largest_batch:,} of this {read}, or {read} {bound.largest_context:,} "
        "of this batch"
    )


COMPARED: dict[str, Callable[[float], str]] = {
    "FLOPs": partial(amount, unit=""),
    "bytes moved": partial(amount, unit="B"),
    "peak bytes": partial(amount, unit="B"),
    "seconds": duration,
}


def print_comparisons(rows: Sequence[Comparison], device: str, console: Console | None = None) -> None:
    console = console or Console()
    table = plain_table(f"on this machine's {device}", "predicted", "measured", "ratio")
    for row in rows:
        told = COMPARED[row.what]
        table.add_row(row.what, told(row.predicted), told(row.measured), f"{row.ratio:.3f}")
    console.print()
    console.print(table)
    if all(row.what != "seconds" for row in rows):
        console.print(f"for seconds, measure the machine in this precision: clearhead calibrate --device {device}")


def as_data(report: Report) -> dict[str, Any]:
    """For --json."""
    data = asdict(report) | {
        "total_parameters": report.total_parameters,
        "flops": report.flops,
        "allowed_flops": report.allowed_flops,
        "num_bytes": report.num_bytes,
        "intensity": report.intensity,
    }
    data["workload"]["config"] = to_dict(report.workload.config)
    for row, told in zip(report.rows, data["rows"], strict=True):
        told["intensity"] = row.intensity
    return data
