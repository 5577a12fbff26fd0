"""The option --threads of all commands that compute.

@app.command()
@takes_threads
def generate(model: ModelArgument) -> None: ...
"""

import inspect
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

from clearhead.threads import set_threads, use_configured_threads

_HELP = "Number of CPU threads; by default $CLEARHEAD_THREADS, or {default}."


def takes_threads(command: Callable[..., None], *, default: int | None = None) -> Callable[..., None]:
    """Add --threads to a command, and set the number before torch is imported.

    default: for a command whose networks are too small to gain from more; None is one for each CPU.
    """

    @wraps(command)
    def wrapped(**arguments: Any) -> None:
        threads = arguments.pop("threads")
        if threads is None and "CLEARHEAD_THREADS" not in os.environ:
            threads = default
        if threads is None:
            use_configured_threads()
        else:
            set_threads(threads)
        command(**arguments)

    signature = inspect.signature(command)
    words = _HELP.format(default=default or "one for each CPU that the process may use")
    option = typer.Option(None, "--threads", help=words, rich_help_panel="Speed")
    parameter = inspect.Parameter("threads", inspect.Parameter.KEYWORD_ONLY, default=option, annotation=int | None)
    wrapped.__signature__ = inspect.Signature([*signature.parameters.values(), parameter])  # type: ignore[attr-defined]
    return wrapped
