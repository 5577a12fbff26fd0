"""Results for people to read.

print_results(results, num_tokens=128, console=Console())
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from clearhead.benchmark.measure import Growth, Result


def print_results(results: Sequence[Result], num_tokens: int, console: Console) -> None:
    decodes = results[0].tokens_per_second is not None
    table = blank_table("engine", "weights")
    heads = ["first token", "prefill tokens/s", "spread"]
    if decodes:
        heads = ["tokens/s", "MB/token", "of bandwidth", *heads, "same tokens"]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in sorted(results, key=lambda row: -(row.tokens_per_second or row.prefill_tokens_per_second)):
        numbers = [
            f"{row.first_token_seconds * 1e3:,.1f} ms",
            f"{row.prefill_tokens_per_second:,.0f}",
            f"{row.spread:.0%}",
        ]
        if row.tokens_per_second is not None and row.bandwidth_share is not None:
            speed = [f"{row.tokens_per_second:,.1f}", f"{row.bytes_per_token / 1e6:,.1f}", f"{row.bandwidth_share:.0%}"]
            same = "" if row.tokens_equal_to_ours is None else f"{row.tokens_equal_to_ours} of {num_tokens}"
            numbers = [*speed, *numbers, same]
        table.add_row(row.engine, row.weights, *numbers)
    console.print(table)
    told = f"Medians of rounds in turns; spread: slowest less fastest round over the median. {bandwidth_of(results)}"
    if decodes:
        told += " Same tokens: as ours in the same weights, up to the first that differs."
    console.print(told)


def print_growth(rows: Sequence[Growth], console: Console) -> None:
    table = blank_table("engine", "weights")
    for head in ("context", "ms/token", "spread", "cache MB/token", "grown", "cache alone"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.engine,
            row.weights,
            f"{row.context:,}",
            f"{row.seconds_per_token * 1e3:,.2f}",
            f"{row.spread:.0%}",
            f"{row.cache_bytes_per_token / 1e6:,.1f}",
            f"{row.grown_seconds * 1e3:+,.2f} ms",
            f"{row.predicted_seconds * 1e3:+,.2f} ms",
        )
    console.print(table)
    console.print("Grown: over the shortest context. Cache alone: its bytes more, at the bandwidth measured here.")


def blank_table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name, no_wrap=True)
    return table


def bandwidth_of(results: Sequence[Result]) -> str:
    rate = results[0].bandwidth_bytes_per_second / 1e9
    return f"This machine reads {rate:,.1f} GB/s in torch's product of a matrix and a vector."
