"""List the keys of a recipe with their types, values and meanings.

for key in recipe_keys(read_recipe("capitals")): print(key.name, key.type, key.value)

The meanings are the comments beside the fields of the config classes, so that they are written in one place only.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from clearhead.config import dataclass_choices, kind_of, to_toml_value
from clearhead.training.recipe import ResolvedRecipe


@dataclass(frozen=True)
class RecipeKey:
    """One key of a recipe."""

    name: str  # with dots: train.steps
    type: str
    value: str
    origin: str  # where the value comes from; see ResolvedRecipe
    about: str  # may be empty


def recipe_keys(resolved: ResolvedRecipe) -> list[RecipeKey]:
    """Return all keys that the recipe has, including those that are not set."""
    return [
        RecipeKey(name, kind, value, resolved.origins.get(name, "default"), about)
        for name, kind, value, about in _walk(resolved.recipe, "")
    ]


def _walk(part: Any, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, value and meaning of each field below a config."""
    hints, comments = get_type_hints(type(part)), _field_comments(type(part))
    for item in fields(part):
        name, value, about = f"{prefix}{item.name}", getattr(part, item.name), comments.get(item.name, "")
        choices, _ = dataclass_choices(hints[item.name])
        if len(choices) == 1 and value is None:  # a table that the recipe lacks, such as [lora]
            inner_hints, inner_comments = get_type_hints(choices[0]), _field_comments(choices[0])
            for inner in fields(choices[0]):
                meaning = inner_comments.get(inner.name, "")
                yield f"{name}.{inner.name}", _type_name(inner_hints[inner.name]), "none", meaning
        elif len(choices) > 1:
            kinds = " | ".join(kind_of(choice) for choice in choices)
            yield f"{name}.kind", kinds, "none" if value is None else kind_of(type(value)), about
        if is_dataclass(value):
            yield from _walk(value, f"{name}.")
        elif not choices:
            yield name, _type_name(hints[item.name]), _value_text(value), about


def _value_text(value: Any) -> str:
    """Return a value as a recipe writes it; a value that is not set is shown as none."""
    return "none" if value is None else to_toml_value(list(value) if isinstance(value, tuple) else value)


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " | ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"list of {_type_name(get_args(hint)[0])}"
    options = [_type_name(option) for option in get_args(hint) if option is not NoneType]
    return " | ".join(options) or hint.__name__


def _field_comments(part: type) -> dict[str, str]:
    """Return the comment beside each field of a class and of its bases."""
    comments: dict[str, str] = {}
    for base in reversed(part.__mro__):
        if is_dataclass(base):
            lines = re.findall(r"^    (\w+): [^#\n]*#\s*(.+)$", inspect.getsource(base), re.MULTILINE)
            comments |= dict(lines)
    return comments
