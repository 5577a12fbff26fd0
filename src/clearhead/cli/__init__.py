"""The command line: parse, call one function, print.

    clearhead --help

The order of the imports is that of the commands in --help.
"""

from clearhead.cli import models, installed, generate, reading, data, trace, train, evaluate, cost, bench, bench_serve  # noqa: I001
from clearhead.cli.app import main

__all__ = [
    "bench",
    "bench_serve",
    "cost",
    "data",
    "evaluate",
    "generate",
    "installed",
    "main",
    "models",
    "reading",
    "trace",
    "train",
]
