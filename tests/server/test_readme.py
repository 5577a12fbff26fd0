"""The table of rules in README.md names tests that exist, and every rule."""

import re
from pathlib import Path

HERE = Path(__file__).parent
TABLE = (HERE / "README.md").read_text(encoding="utf-8")


def test_every_test_of_the_table_exists():
    defined = {name for file in HERE.glob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text("utf-8"))}
    named = set(re.findall(r"`(test_\w+)`", TABLE))
    assert len(named) > 40
    assert named - defined == set()
    files = set(re.findall(r"`(test_\w+\.py)`", TABLE))
    assert [name for name in files if not (HERE / name).exists()] == []


def test_every_rule_has_a_row():
    rows = [line.split("|")[1] for line in TABLE.splitlines() if line.startswith("| ")]
    found = set()
    for row in rows:
        for kind, first, last in re.findall(r"([AS])(\d+)(?: to [AS](\d+))?", row):
            found |= {f"{kind}{number}" for number in range(int(first), int(last or first) + 1)}
    assert found >= {f"A{number}" for number in range(1, 26)} | {f"S{number}" for number in range(1, 13)}
