"""Print the results of a benchmark as tables, with an explanation of the numbers.

print_speeds(results, num_tokens=128, console=Console())
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from clearhead.benchmark.measurement import GrowthResult, SpeedResult
from clearhead.benchmark.serving_result import ServingResult

_HTTP = "HTTP / its: the same for `clearhead serve`. "


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


def print_serving(results: Sequence[ServingResult], console: Console) -> None:
    """Print one line per load and engine."""
    times = ["first p50", "p99", "later", "next p50", "p99"]
    over_http = any(result.server_ratio is not None for result in results)
    ratios = ["ours / its", "HTTP / its"] if over_http else ["ours / its"]
    table = _make_table(["clients", "tokens/s", *ratios, "requests/s", *times, "spread"])
    for result in results:
        later = result.later_request_seconds
        table.add_row(
            result.engine,
            result.weights,
            str(result.concurrency),
            f"{result.tokens_per_second:,.1f}",
            *map(_ratio, (result.clearhead_ratio, result.server_ratio)[: len(ratios)]),
            f"{result.requests_per_second:,.2f}",
            *map(_milliseconds, (result.first_token_p50, result.first_token_p99, later)),
            *map(_milliseconds, (result.between_tokens_p50, result.between_tokens_p99)),
            f"{result.spread:.0%}",
        )
    console.print(table)
    one = results[0]
    prefix = f" after a prefix of {one.shared_prefix} that all requests of a round share" if one.shared_prefix else ""
    console.print(
        f"Prompts of {one.prompt_length} random tokens{prefix}, {one.num_tokens} new tokens. Each client sends its "
        "next request when its last one is finished. Tokens/s: new tokens of all requests. Ours / its: Clearhead's "
        f"tokens/s divided by this engine's in the same round. {_HTTP if over_http else ''}First: from sending a "
        "request to its first token; later: the median of requests sent after the first ones were finished. Next: "
        "between two tokens of a request. Times are in milliseconds. Medians over rounds in which the engines "
        "alternate. Spread: (fastest - slowest round) / median."
    )


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"


def _make_table(headings: Sequence[str]) -> Table:
    """Return an empty table with columns for engine and weights, and right-aligned ones for numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("engine", "weights"):
        table.add_column(name, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
