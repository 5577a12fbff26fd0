"""The studies by name: what each asks, and which statements of the book it tests. This module imports no torch.

print(ENTRIES["mask"].title, ENTRIES["mask"].statements)
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A study in the list: its name, its question, and the statements of docs/book.md that it tests."""

    name: str
    title: str
    statements: tuple[str, ...]


_ENTRIES = (
    Entry(name="mask", title="Where the causal mask belongs", statements=("A5", "D1", "D2")),
    Entry(name="scale", title="Why scores are divided by √d", statements=("A2", "A3", "A6")),
    Entry(name="cache", title="What a key-value cache saves", statements=("E1", "E2", "E3", "E4")),
    Entry(name="bottleneck", title="One state or attention", statements=("A4", "A10", "C3", "C4", "D4")),
    Entry(name="length", title="Texts longer than those of the training", statements=("B1", "B2", "B3", "B4")),
    Entry(name="nope", title="Positions without position encodings", statements=("B4",)),
    Entry(name="order", title="The order of words", statements=("A8", "B1", "B2", "B5")),
    Entry(name="forget", title="How far gradients reach", statements=("A4", "C1")),
    Entry(name="heads", title="Sharing keys and values among heads", statements=("A7", "A9")),
    Entry(name="tables", title="The cost tables, counted", statements=("A1", "F1", "F2", "F3", "F4", "F5")),
    Entry(name="models", title="Every model of the table, at toy size", statements=("C1", "C2", "C3", "C5")),
    Entry(name="adapt", title="Pretrain, then prompt or fine-tune", statements=("D3",)),
    Entry(name="scaling", title="Loss, parameters and data", statements=("D1", "F1")),
)
ENTRIES = {entry.name: entry for entry in _ENTRIES}
