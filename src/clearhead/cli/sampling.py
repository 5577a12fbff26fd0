"""Sampling options on the command line: the fields of SamplingOptions with their defaults, descriptions and checks.

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
from clearhead.options import (
    SamplingOptions,
    check_names,
    check_positive_integer,
    check_temperature_is_set,
    description_of,
    option_fields,
)

# Name of the option: its type on the command line, and its group in --help. The help texts are those of the fields.
OPTIONS: dict[str, tuple[Any, str]] = {
    "max_new_tokens": (int, "Length"),
    "min_new_tokens": (int, "Length"),
    "stop": (list[str], "Length"),
    "stop_ids": (list[int], "Length"),
    "temperature": (float, "Sampling"),
    "top_k": (int | None, "Sampling"),
    "top_p": (float | None, "Sampling"),
    "min_p": (float | None, "Sampling"),
    "seed": (int | None, "Sampling"),
    "repetition_penalty": (float, "Penalties"),
    "presence_penalty": (float, "Penalties"),
    "frequency_penalty": (float, "Penalties"),
    "logit_bias": (list[str], "Penalties"),
}
_REPEATED = {  # an option that takes one value at a time: its flag and its help text
    "stop": ("--stop", "String that ends the text; may be repeated."),
    "stop_ids": ("--stop-id", "Token id that ends the text; may be repeated."),
    "logit_bias": ("--logit-bias", "ID=BIAS, a value to add to the logit of a token; may be repeated."),
}


def takes_sampling(defaults: SamplingOptions) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the sampling options to a command, which receives those that differ from SamplingOptions as `sampling`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def wrapped(**arguments: Any) -> None:
            values = {name: arguments.pop(name) for name in OPTIONS}
            command(**arguments, sampling=_parse_sampling(values))

        own = [parameter for name, parameter in inspect.signature(command).parameters.items() if name != "sampling"]
        shared = [_option_parameter(name, getattr(defaults, name)) for name in OPTIONS]
        wrapped.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
        return wrapped

    return decorate


def _option_parameter(name: str, default: Any) -> inspect.Parameter:
    kind, group = OPTIONS[name]
    flag, words = _REPEATED.get(name, (f"--{name.replace('_', '-')}", _DESCRIPTIONS[name]))
    option = typer.Option(list(default) if name in _REPEATED else default, flag, help=words, rich_help_panel=group)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


_DESCRIPTIONS = {each.name: description_of(each) for each in option_fields(SamplingOptions)}


def _parse_sampling(values: dict[str, Any]) -> dict[str, Any]:
    """Check the options before a model is loaded, and return those that differ from the defaults of SamplingOptions."""
    bias = [_parse_bias(text) for text in values["logit_bias"]]
    options, defaults = SamplingOptions(**(values | {"logit_bias": bias})), SamplingOptions()
    return {name: getattr(options, name) for name in OPTIONS if getattr(options, name) != getattr(defaults, name)}


def _parse_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ClearheadError(f"--logit-bias is {text!r}; it must be a token id and a number, as in 42=-1.5") from None


def check_search(sampling: dict[str, Any], n: int, beams: int | None, length_penalty: float | None) -> None:
    """Raise ClearheadError if the options of sampling and beam search exclude each other or are out of range."""
    given = sampling if length_penalty is None else sampling | {"length_penalty": length_penalty}
    if beams is None:
        check_temperature_is_set(sampling, n)
    else:
        check_positive_integer("beams", beams)
    check_positive_integer("n", n)
    check_names(given, beams=beams is not None)


def given_options(**options: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}
