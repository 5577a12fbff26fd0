"""The options of sampling on the command line: those of SamplingOptions, with its types, defaults and checks.

@app.command()
@takes_sampling(SamplingOptions())
def generate(model: ModelArgument, sampling: dict[str, Any]) -> None: ...
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

from clearhead.errors import ClearheadError
from clearhead.options import SamplingOptions

# Name of the option: its type, its group in --help, what it does.
OPTIONS: dict[str, tuple[Any, str, str]] = {
    "max_new_tokens": (int, "Length", "How many tokens at most."),
    "min_new_tokens": (int, "Length", "Nothing ends the text before so many."),
    "stop": (list[str], "Length", "A string that ends the text; may be given again."),
    "stop_ids": (list[int], "Length", "A token id that ends the text; may be given again."),
    "temperature": (float, "Sampling", "0: always the likeliest token; 1: as the model weighs them."),
    "top_k": (int | None, "Sampling", "Only the k likeliest tokens."),
    "top_p": (float | None, "Sampling", "Only the likeliest tokens that make up this probability."),
    "min_p": (float | None, "Sampling", "Only tokens at least this times as likely as the likeliest."),
    "seed": (int | None, "Sampling", "The same draw each time."),
    "repetition_penalty": (float, "Penalties", "Above 1: tokens of prompt and text become less likely."),
    "presence_penalty": (float, "Penalties", "Taken from the logit of a token that the text has."),
    "frequency_penalty": (float, "Penalties", "Taken for each time that the text has it."),
    "logit_bias": (list[str], "Penalties", "ID=BIAS, added to the logit of a token; may be given again."),
}
LISTS = (list[str], list[int])
FLAGS = {"stop_ids": "--stop-id"}  # one at a time


def takes_sampling(defaults: SamplingOptions) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds them to a command, which gets what was asked as `sampling`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def wrapped(**given: Any) -> None:
            asked = {name: given.pop(name) for name in OPTIONS}
            command(**given, sampling=checked(asked))

        own = [parameter for name, parameter in inspect.signature(command).parameters.items() if name != "sampling"]
        shared = [option(name, getattr(defaults, name)) for name in OPTIONS]
        wrapped.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
        return wrapped

    return decorate


def option(name: str, default: Any) -> inspect.Parameter:
    kind, group, words = OPTIONS[name]
    flag = FLAGS.get(name, "--" + name.replace("_", "-"))
    shown = typer.Option(list(default) if kind in LISTS else default, flag, help=words, rich_help_panel=group)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=shown, annotation=kind)


def checked(asked: dict[str, Any]) -> dict[str, Any]:
    """Those that change something, found right before a model is loaded for them."""
    bias = [read_bias(text) for text in asked["logit_bias"]]
    options, unasked = SamplingOptions(**(asked | {"logit_bias": bias})), SamplingOptions()
    return {name: getattr(options, name) for name in OPTIONS if getattr(options, name) != getattr(unasked, name)}


def read_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ClearheadError(f"--logit-bias is {text!r}; it must be a token id and a number, as in 42=-1.5") from None
