"""What the parity tests compare of each class of transformers, found in the tests themselves.

comparisons()["MixtralForCausalLM"].checks    # {"logits", "float64", "saved", "errors", "greedy", "beams"}
"""

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType

from tests.parity.config_types import TYPES
from tests.parity.harness import Case

# function that a test calls -> what it compares
CHECKS = {
    "check_logits": {"logits"},
    "check_float64": {"float64"},
    "check_round_trip": {"saved"},
    "check_briefly": {"logits", "float64", "saved"},
    "check_mutants": {"errors"},
    "check_greedy": {"greedy"},
    "check_beams": {"beams"},
    "check_texts": {"greedy", "beams"},
    "silent_differences": {"fields"},
}
# Tests over all types, whose cases are elsewhere
SWEEPS = ("test_config_fields.py", "test_generation.py", "test_modules.py")
OF_ENCODERS = {"logits", "float64", "saved", "errors", "fields"}
OF_DECODERS = OF_ENCODERS | {"greedy", "beams"}


@dataclass
class Comparison:
    """The checks that a class passes, and the first case and the file where it does."""

    file: str
    case: str
    checks: set[str] = field(default_factory=set)


@cache
def comparisons() -> dict[str, Comparison]:
    """Return the comparison of each class that is a parity case."""
    found: dict[str, Comparison] = {}
    folder = Path(__file__).parent
    for path in sorted(folder.glob("test_*.py")):
        module = importlib.import_module(f"tests.parity.{path.stem}")
        for function in vars(module).values():
            if inspect.isfunction(function) and function.__name__.startswith("test_"):
                for case, class_name, checks in _compared_by(function, module):
                    entry = found.setdefault(class_name, Comparison(path.name, case))
                    if entry.file in SWEEPS:
                        entry.file, entry.case = path.name, case
                    entry.checks |= checks
    return found


def _compared_by(function: FunctionType, module: ModuleType) -> Iterator[tuple[str, str, set[str]]]:
    """Yield (name of the case, class, checks) for the cases that a test runs."""
    marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    values = [value for mark in marks for row in mark.args[1] for value in (row if isinstance(row, tuple) else (row,))]
    used = [vars(module).get(name) for name in function.__code__.co_names]
    called = {getattr(each, "__name__", "") for each in (*values, *used)}
    checks = set().union(*(CHECKS[name] for name in called & CHECKS.keys()))
    names_types = any("name" in mark.args[0] or mark.args[0] == "model_type" for mark in marks)
    for value in (*values, *used):
        if isinstance(value, Case):
            yield value.name, _class_of(value), checks
        elif names_types and isinstance(value, str) and value in TYPES:
            yield value, TYPES[value][0], checks


_CLASSES: dict[int, tuple[Case, str]] = {}


def _class_of(case: Case) -> str:
    """Return the class of transformers that a case builds."""
    if id(case) not in _CLASSES:
        _CLASSES[id(case)] = case, type(case.build()).__name__
    return _CLASSES[id(case)][1]
