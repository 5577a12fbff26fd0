"""The command line: parse, call one function, print.

    clearhead --help

The order of the imports is that of the commands in --help.
"""

from clearhead.cli import models, create, installed, generate, serve, reading, data, trace  # noqa: I001
from clearhead.cli import study, train, evaluate, cost, bench, bench_serve
from clearhead.cli.app import main

__all__ = [
    "bench",
    "bench_serve",
    "cost",
    "create",
    "data",
    "evaluate",
    "generate",
    "installed",
    "main",
    "models",
    "reading",
    "serve",
    "study",
    "trace",
    "train",
]
