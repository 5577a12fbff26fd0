"""Validate config dataclasses and convert them to and from plain data, JSON and TOML.

    from_json(ModelConfig, to_json(config)) == config

A field that admits several dataclasses is written with the `kind` of its value, unless that class sets
KIND_IS_OPTIONAL. Consecutive equal items in a tuple of
dataclasses are written once, with `times`. None is omitted. Reading is strict: an unknown key, a wrong type or a
missing value raises ClearheadError, and the message names its place.
"""

import json
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import groupby
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from clearhead.errors import ClearheadError, quote, unknown_name
from clearhead.files import parse_json

T = TypeVar("T")
MAX_LAYERS = 1000  # bounds the work of building a network; the deepest released model has 126
MAX_SIZE = 10**9  # far above any width, vocabulary or context; the product of two of them fits in 64 bits
MAX_NUMBER = 3.4028234663852886e38  # the largest float32, in which networks compute
MAX_NESTING = 32  # levels of tables and lists; a whole model in a recipe has 8

_type_hints: Callable[[type], dict[str, Any]] = cache(get_type_hints)  # a model has hundreds of parts of a dozen types


def kind_of(part: type) -> str:
    """Return the `kind` that stands for a class in plain data: GroupedAttention -> grouped_attention."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", part.__name__).lower()


def dataclass_choices(hint: Any) -> tuple[list[type], bool]:
    """Return the dataclasses that a type hint admits, and whether it also admits None."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    parts = [option for option in options if isinstance(option, type) and is_dataclass(option)]
    return parts, NoneType in options


class CheckedConfig:
    """Base of config dataclasses: check the type and range of every field when the instance is created.

    Numbers must be greater than 0 and fit in float32; those named in MAY_BE_ZERO may be 0. A field whose name ends in
    `share` must be between 0 and 1. A whole number is at most MAX_SIZE, except in fields named in MAY_BE_LARGE.
    """

    MAY_BE_ZERO: ClassVar[tuple[str, ...]] = ()
    MAY_BE_LARGE: ClassVar[tuple[str, ...]] = ()
    KIND_IS_OPTIONAL: ClassVar[bool] = False  # among several choices, this is the one meant by data without a kind

    def __post_init__(self) -> None:
        hints = _type_hints(type(self))
        for name, value in vars(self).items():
            where = f"{type(self).__name__}.{name}"
            if get_origin(hints[name]) is Literal:
                if value not in get_args(hints[name]):
                    raise unknown_name(where, str(value), get_args(hints[name]))
            elif required := self._violated(name, value, hints[name]):  # a message costs more than all checks
                raise ClearheadError(f"{where} is {quote(value)}; it must be {required}")

    def _violated(self, name: str, value: Any, hint: Any) -> str | None:
        """Return what a field must be if its value is not, else None."""
        if not _matches_type(value, hint):
            return _describe_type(hint)
        if name in self.MAY_BE_ZERO and value is not None:
            if not 0 <= value < math.inf:
                return "0 or more"
        elif name.endswith("share"):
            if not 0 < value < 1:
                return "between 0 and 1"
        elif type(value) in (int, float) and not 0 < value < math.inf:
            return "a finite number greater than 0" if _matches_type(0.5, hint) else "a whole number, 1 or more"
        if type(value) in (int, float) and value > MAX_NUMBER:
            return f"at most {MAX_NUMBER:.3g}"
        if type(value) is int and name not in self.MAY_BE_LARGE and not _matches_type(0.5, hint) and value > MAX_SIZE:
            return f"at most {MAX_SIZE}"
        return None


_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "None"}


def _matches_type(value: Any, hint: Any) -> bool:
    """Return whether a value has the type of a hint. An int also counts as a float; a bool counts as neither."""
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_matches_type(value, option) for option in options)
    if origin is tuple:
        return isinstance(value, tuple) and all(_matches_type(item, options[0]) for item in value)
    if hint in (int, float):
        return type(value) is int or type(value) is hint
    return isinstance(value, hint)


def _describe_type(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"a tuple of {_describe_type(get_args(hint)[0])}"
    return " or ".join(_TYPE_NAMES.get(option, option.__name__) for option in get_args(hint) or (hint,))


def check_nesting(data: Any, where: str) -> None:
    """Raise ClearheadError if tables and lists are nested deeper than any config, before a recursion meets them."""
    level = [data]
    for _ in range(MAX_NESTING):
        parts = (item.values() if isinstance(item, Mapping) else item for item in level)
        level = [item for part in parts for item in part if isinstance(item, (Mapping, list))]
        if not level:
            return
    raise ClearheadError(f"{where} has tables or lists nested more than {MAX_NESTING} deep, which no setting needs")


# --- to plain data


def to_dict(part: Any) -> dict[str, Any]:
    """Convert a config dataclass to plain data: dicts, lists, strings, numbers and booleans."""
    hints = _type_hints(type(part))
    pairs = ((item.name, getattr(part, item.name)) for item in fields(part))
    return {name: _plain(value, hints[name]) for name, value in pairs if value is not None}


def _plain(value: Any, hint: Any) -> Any:
    if is_dataclass(value):
        choices, _ = dataclass_choices(hint)
        needs_kind = len(choices) > 1 and not getattr(value, "KIND_IS_OPTIONAL", False)
        kind = {"kind": kind_of(type(value))} if needs_kind else {}
        return kind | to_dict(value)
    if isinstance(value, tuple):
        inner = get_args(hint)[0]
        if not dataclass_choices(inner)[0]:
            return [_plain(item, inner) for item in value]
        runs = [(_plain(item, inner), len(list(equal))) for item, equal in groupby(value)]
        return [plain if times == 1 else {"times": times} | plain for plain, times in runs]
    return value


# --- from plain data


def from_dict(part: type[T], data: Any, where: str = "") -> T:
    """Create a `part` from plain data. `where` is how error messages name its place."""
    where = where or kind_of(part)
    if not isinstance(data, Mapping):
        raise ClearheadError(f"{where} must be a table of named values, not {quote(data)}")
    hints = _type_hints(part)
    part_fields = {item.name: item for item in fields(part)}  # type: ignore[arg-type]
    for key in data:
        if key not in part_fields:
            raise unknown_name(f"key in {where}:", str(key), part_fields)
    values = {}
    for name, item in part_fields.items():
        if name in data:
            values[name] = _parse(hints[name], data[name], f"{where}.{name}")
        elif item.default is MISSING and item.default_factory is MISSING:
            raise ClearheadError(f"{where}.{name} is missing; add it")
    try:
        return part(**values)
    except ClearheadError as error:  # CheckedConfig names a field by its class; here its place is known
        raise ClearheadError(str(error).replace(f"{part.__name__}.", f"{where}.")) from None


def _parse(hint: Any, data: Any, where: str) -> Any:
    choices, optional = dataclass_choices(hint)
    if data is None and optional:
        return None
    if choices:
        return _parse_choice(choices, data, where)
    if get_origin(hint) is tuple:
        return _parse_tuple(get_args(hint)[0], data, where)
    if get_origin(hint) is Literal:
        if data not in get_args(hint):
            raise unknown_name(f"{where}:", str(data), map(str, get_args(hint)))
        return data
    options = [option for option in (get_args(hint) or (hint,)) if option is not NoneType]
    return _parse_scalar(options[0], data, where)


def _parse_choice(choices: list[type], data: Any, where: str) -> Any:
    if len(choices) == 1:
        return from_dict(choices[0], data, where)
    kinds = {kind_of(choice): choice for choice in choices}
    default = next((choice for choice in choices if getattr(choice, "KIND_IS_OPTIONAL", False)), None)
    if default is not None and isinstance(data, Mapping) and "kind" not in data:
        return from_dict(default, data, where)
    if not isinstance(data, Mapping) or not isinstance(data.get("kind"), str):
        raise ClearheadError(f"{where} needs a kind: one of {', '.join(sorted(kinds))}")
    if data["kind"] not in kinds:
        raise unknown_name(f"{where}.kind:", data["kind"], kinds)
    return from_dict(kinds[data["kind"]], {k: v for k, v in data.items() if k != "kind"}, where)


def _parse_tuple(inner: Any, data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, Iterable) or isinstance(data, (str, bytes, Mapping)):
        raise ClearheadError(f"{where} must be a list, not {quote(data)}")
    items: list[Any] = []
    for number, entry in enumerate(data):
        times = 1
        if isinstance(entry, Mapping) and "times" in entry:
            times = _parse_scalar(int, entry["times"], f"{where}[{number}].times")
            entry = {k: v for k, v in entry.items() if k != "times"}
            if not 1 <= times <= MAX_LAYERS - len(items):
                raise ClearheadError(
                    f"{where}[{number}].times is {times}; it must be at least 1, and the list may have {MAX_LAYERS} "
                    "entries at most"
                )
        items.extend([_parse(inner, entry, f"{where}[{number}]")] * times)
    return tuple(items)


def _parse_scalar(kind: Any, data: Any, where: str) -> Any:
    if kind is float and isinstance(data, (int, float)) and not isinstance(data, bool):
        if not abs(data) <= sys.float_info.max:
            raise ClearheadError(f"{where} must be a finite number")
        return float(data)
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise ClearheadError(f"{where} is {quote(data)}; it must be {_describe_type(kind)}")
    if kind is int and not -(2**63) <= data < 2**63:
        raise ClearheadError(f"{where} is out of range; it must fit in 64 bits")
    return data


# --- JSON and TOML


def to_json(part: Any) -> str:
    """Convert a config dataclass to indented JSON."""
    return json.dumps(to_dict(part), indent=2) + "\n"


def from_json(part: type[T], text: str) -> T:
    """Create a config dataclass from JSON: from_json(ModelConfig, text)."""
    data = parse_json(text)
    check_nesting([data], "the JSON")
    return from_dict(part, data)


def config_changes(old: Any, new: Any) -> list[str]:
    """Return the settings in which two configs differ, one line each: `decoder.layers.0.norm.kind: a → b`."""
    before, after = (dict(_settings(to_dict(part))) for part in (old, new))
    names = [*after, *(name for name in before if name not in after)]
    changed = [name for name in names if before.get(name) != after.get(name)]
    return [f"{name}: {before.get(name, 'none')} → {after.get(name, 'none')}" for name in changed]


def _settings(data: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every single value of nested data with its path."""
    if isinstance(data, Mapping | list):
        for key, value in data.items() if isinstance(data, Mapping) else enumerate(data):
            yield from _settings(value, (*path, str(key)))
    else:
        yield ".".join(path), data


def from_toml(part: type[T], text: str) -> T:
    """Create a config dataclass from TOML: from_toml(ModelConfig, text)."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ClearheadError(f"the text is not valid TOML: {error}") from None
    check_nesting(data, "the TOML")
    return from_dict(part, data)


def to_toml(part: Any) -> str:
    """Convert a config dataclass to TOML."""
    return "\n".join(_toml_table(to_dict(part), ())).strip() + "\n"


def _toml_table(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """Return the lines of a table: its plain values, then [sub.tables], then [[lists.of.tables]]."""
    lines = [f"{key} = {to_toml_value(value)}" for key, value in table.items() if not _is_table(value)]
    for key, value in table.items():
        name = ".".join((*path, key))
        if isinstance(value, Mapping):
            lines += ["", f"[{name}]", *_toml_table(value, (*path, key))]
        elif _is_table(value):
            for entry in value:
                lines += ["", f"[[{name}]]", *_toml_table(entry, (*path, key))]
    return lines


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)
    )


def to_toml_value(value: Any) -> str:
    """Return a plain value as TOML writes it."""
    # JSON writes booleans, integers, lists and strings as TOML does, except DEL. repr keeps the point of a float.
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")
