"""Findings for people to read: one line each, then what the numbers mean.

print_findings(findings, model, Console())
"""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clearhead.api import Model
from clearhead.verification.finding import TOLERANCES, Finding
from clearhead.verification.subject import dtype_of

STYLES = {"pass": "green", "fail": "bold red", "skipped": "dim"}


def print_findings(findings: Sequence[Finding], model: Model, console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("verdict", no_wrap=True)
    table.add_column("difference", justify="right", no_wrap=True)
    table.add_column("tolerance", justify="right", no_wrap=True)
    table.add_column("check", overflow="fold")
    for finding in findings:
        numbers = (finding.difference, finding.tolerance)
        shown = ["" if number is None else f"{number:.1e}" for number in numbers]
        check = f"{finding.check} [dim]({escape(finding.detail)})[/dim]"
        table.add_row(f"[{STYLES[finding.verdict]}]{finding.verdict}[/]", *shown, check)
    console.print(table)
    counts: Counter[str] = Counter(finding.verdict for finding in findings)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in STYLES if counts[verdict])
    dtype = dtype_of(model.network)
    console.print(
        f"{told}; in {str(dtype).removeprefix('torch.')}. A difference is the largest between two logits; its "
        f"tolerance is {TOLERANCES[dtype]:g} times the logit of the likeliest token, or times 1 where that is less."
    )
