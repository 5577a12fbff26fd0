"""Print the results of all checks as a table, with an explanation of the numbers.

print_results(results, model, Console())
"""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clearhead.api import Model
from clearhead.verification.case import network_dtype
from clearhead.verification.results import TOLERANCES, CheckResult

STYLES = {"pass": "green", "fail": "bold red", "skipped": "dim"}


def print_results(results: Sequence[CheckResult], model: Model, console: Console) -> None:
    """Print one line per result, then the number of each verdict."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("verdict", no_wrap=True)
    table.add_column("difference", justify="right", no_wrap=True)
    table.add_column("tolerance", justify="right", no_wrap=True)
    table.add_column("check", overflow="fold")
    for result in results:
        numbers = ["" if number is None else f"{number:.1e}" for number in (result.difference, result.tolerance)]
        check = f"{result.check} [dim]({escape(result.detail)})[/dim]"
        table.add_row(f"[{STYLES[result.verdict]}]{result.verdict}[/]", *numbers, check)
    console.print(table)
    counts: Counter[str] = Counter(result.verdict for result in results)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in STYLES if counts[verdict])
    dtype = network_dtype(model.network)
    tolerance = f"{TOLERANCES[dtype]:g}"
    console.print(
        f"{summary}, in {str(dtype).removeprefix('torch.')}. The difference is the largest absolute difference "
        f"between two logits. The tolerance is {tolerance} times the logit of the most likely token, and at least "
        f"{tolerance}; for packed weights, both are relative errors."
    )
