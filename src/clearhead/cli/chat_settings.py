"""Sampling options as a chat shows and changes them: /set temperature 0.7.

options = change_option(options, "temperature", "0.7"); lines = describe_options(options)
"""

import json
import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, get_args, get_origin

from clearhead.cli.sampling import OPTIONS
from clearhead.errors import ClearheadError, unknown_name
from clearhead.options import SamplingOptions, check_temperature_is_set

OFF = "none"  # the value that turns an option off
_DEFAULTS = SamplingOptions()


def find_option(name: str) -> str:
    """Return the option of this name, also if it is spelled as on the command line: --top-p."""
    known = name.strip().lower().lstrip("-").replace("-", "_")
    if known not in OPTIONS:
        raise unknown_name("option", known, OPTIONS)
    return known


def change_option(options: Mapping[str, Any], name: str, text: str) -> dict[str, Any]:
    """Return options with one changed. Raise ClearheadError, which names the nearest option, if it is not valid."""
    name = find_option(name)
    value = getattr(_DEFAULTS, name) if text.strip().lower() == OFF else _parse(name, text.strip())
    checked = SamplingOptions(**{**options, name: value})
    changed = {field.name: getattr(checked, field.name) for field in fields(checked)}
    differing = {key: each for key, each in changed.items() if each != getattr(_DEFAULTS, key)}
    check_temperature_is_set(differing)
    return differing


def _parse(name: str, text: str) -> Any:
    """Return the value of an option from its text."""
    if name == "stop":
        return _parse_stop(text)
    if name == "stop_ids":
        return [_convert(name, word, int, "whole numbers, such as 2 11") for word in text.split()]
    if name == "logit_bias":
        return [_parse_bias(word) for word in text.split()]
    kind = OPTIONS[name][0]
    if get_origin(kind) in (types.UnionType,):
        kind = next(each for each in get_args(kind) if each is not type(None))
    wanted = "a whole number" if kind is int else "a number"
    return _convert(name, text, kind, wanted if getattr(_DEFAULTS, name) is not None else f"{wanted}, or {OFF}")


def _convert(name: str, text: str, kind: Callable[[str], Any], wanted: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ClearheadError(f"{name} is {text!r}; it must be {wanted}") from None


def _parse_stop(text: str) -> Any:
    """Return a stop string as it is, or strings in JSON, which can contain line breaks: "\\n\\n" or ["a", "b"]."""
    if text[:1] not in ('"', "["):
        return [text]
    return _convert("stop", text, json.loads, 'a text, or JSON such as "\\n\\n" or ["one", "two"]')


def _parse_bias(word: str) -> tuple[int, float]:
    token, _, bias = word.partition("=")
    wanted = "token ids with a number each, such as 42=-1.5"
    return _convert("logit_bias", token, int, wanted), _convert("logit_bias", bias, float, wanted)


def describe_options(options: Mapping[str, Any]) -> list[str]:
    """Return a line for each option, with its value."""
    return [describe_option(options, name) for name in OPTIONS]


def describe_option(options: Mapping[str, Any], name: str) -> str:
    """Return an option with its value, as /set takes it."""
    value = options.get(name, getattr(_DEFAULTS, name))
    if value is None or value == ():
        return f"{name} {OFF}"
    match name:
        case "stop":
            return f"{name} {json.dumps(list(value), ensure_ascii=False)}"
        case "stop_ids":
            return f"{name} {' '.join(map(str, value))}"
        case "logit_bias":
            return f"{name} {' '.join(f'{token}={bias:g}' for token, bias in value)}"
    return f"{name} {value}"
