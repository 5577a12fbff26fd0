"""Print the results of a benchmark as tables, with an explanation of the numbers.

print_speeds(results, num_tokens=128, console=Console())
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from clearhead.benchmark.measurement import GrowthResult, SpeedResult


def print_speeds(results: Sequence[SpeedResult], num_tokens: int, console: Console) -> None:
    """Print one line per engine, the fastest first."""
    decodes = results[0].tokens_per_second is not None
    headings = ["first token", "prefill tokens/s", "spread"]
    if decodes:
        headings = ["tokens/s", "MB/token", "of bandwidth", *headings, "same tokens"]
    table = _make_table(headings)
    for result in sorted(results, key=lambda one: -(one.tokens_per_second or one.prefill_tokens_per_second)):
        numbers = [
            f"{result.first_token_seconds * 1e3:,.1f} ms",
            f"{result.prefill_tokens_per_second:,.0f}",
            f"{result.spread:.0%}",
        ]
        if result.tokens_per_second is not None and result.bandwidth_share is not None:
            megabytes = f"{result.bytes_per_token / 1e6:,.1f}"
            speed = [f"{result.tokens_per_second:,.1f}", megabytes, f"{result.bandwidth_share:.0%}"]
            same = "" if result.tokens_equal_to_ours is None else f"{result.tokens_equal_to_ours} of {num_tokens}"
            numbers = [*speed, *numbers, same]
        table.add_row(result.engine, result.weights, *numbers)
    console.print(table)
    bandwidth = results[0].bandwidth_bytes_per_second / 1e9
    explanation = (
        "Medians over rounds in which the engines alternate. Spread: (slowest - fastest round) / median. This machine "
        f"reads {bandwidth:,.1f} GB/s in PyTorch's matrix-vector product."
    )
    if decodes:
        explanation += (
            " MB/token: weights and cache that a token reads. Of bandwidth: their rate as a share of these GB/s. Same "
            "tokens: equal to Clearhead's with the same weights, up to the first that differs."
        )
    console.print(explanation)


def print_growth(results: Sequence[GrowthResult], console: Console) -> None:
    """Print one line per engine and context length."""
    table = _make_table(["context", "ms/token", "spread", "cache MB/token", "added", "added by cache"])
    for result in results:
        table.add_row(
            result.engine,
            result.weights,
            f"{result.context:,}",
            f"{result.seconds_per_token * 1e3:,.2f}",
            f"{result.spread:.0%}",
            f"{result.cache_bytes_per_token / 1e6:,.1f}",
            f"{result.added_seconds * 1e3:+,.2f} ms",
            f"{result.predicted_added_seconds * 1e3:+,.2f} ms",
        )
    console.print(table)
    console.print(
        "Added: time per token compared with the shortest context. Added by cache: the time to read the additional "
        "cache bytes at the bandwidth measured here."
    )


def _make_table(headings: Sequence[str]) -> Table:
    """Return an empty table with columns for engine and weights, and right-aligned ones for numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("engine", "weights"):
        table.add_column(name, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
