"""A test of the tests: every config one field away from the right one, made by walking the right one.

for path, wrong in mutants(config): ...   # path names the field, e.g. decoder.layers[0].attention.scale
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from clearhead.architecture import (
    Alibi,
    Bidirectional,
    Causal,
    Chunked,
    ModelConfig,
    NoPosition,
    RelativeBuckets,
    RelativeSinusoid,
    Rope,
    SlidingWindow,
)
from clearhead.config import dataclass_choices
from clearhead.errors import ClearheadError

# Fields that change nothing in a float32 forward, each with its reason.
WITHOUT_EFFECT = {
    "context": "says what the model was made for",
    "dropout": "training only",
    "initial": "before training only",
    "pooler": "not part of the logits",
    "scale_in_float32": "half precision only",
}
# What an absent number becomes.
INSTEAD_OF_NONE: dict[str, Any] = {"softcap": 2.0, "clip": 0.3, "scale": 0.9, "renormalize_epsilon": 1e-20}


def mutants(config: ModelConfig) -> Iterator[tuple[str, ModelConfig]]:
    yield from wrong_values(config, "")


def wrong_values(part: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every version of `part` with one error somewhere inside."""
    hints = get_type_hints(type(part))
    for item in fields(part):
        if item.name in WITHOUT_EFFECT:
            continue
        value, where = getattr(part, item.name), f"{path}.{item.name}".lstrip(".")
        for inner_path, wrong in wrong_field(item.name, value, hints[item.name], where):
            try:
                yield inner_path, replace(part, **{item.name: wrong})
            except ClearheadError:
                continue  # cannot even be spelled


def wrong_field(name: str, value: Any, hint: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, tuple):
        for number, layer in enumerate(dict.fromkeys(value)):
            for inner_path, wrong in wrong_values(layer, f"{path}[{number}]"):
                yield inner_path, tuple(wrong if one == layer else one for one in value)
    elif is_dataclass(value):
        yield from wrong_values(value, path)
        for other in other_choices(value, hint):
            yield f"{path}: {type(other).__name__}", other
        if dataclass_choices(hint)[1] and name != "head":  # without a head no logits come out
            yield f"{path}: None", None
    elif get_origin(hint) is Literal:
        for option in get_args(hint):
            if option != value:
                yield f"{path}: {option}", option
    elif isinstance(value, bool):
        yield path, not value
    elif isinstance(value, int):
        yield f"{path} + 1", value + 1
        if value > 1:
            yield f"{path} - 1", value - 1
    elif isinstance(value, float):
        yield path, value + 1e-2 if "epsilon" in name else value * 1.05
    elif value is None and name in INSTEAD_OF_NONE and not dataclass_choices(hint)[0]:
        yield path, INSTEAD_OF_NONE[name]


def other_choices(value: Any, hint: Any) -> Iterator[Any]:
    """Neighbours of another type, where they need no further numbers."""
    match value:
        case Rope() | RelativeBuckets() | RelativeSinusoid() | Alibi() if NoPosition in dataclass_choices(hint)[0]:
            yield NoPosition()
        case NoPosition() if RelativeBuckets in dataclass_choices(hint)[0]:
            yield Rope()
        case Bidirectional():
            yield Causal()
        case Causal():
            yield from (Bidirectional(), SlidingWindow(size=3))
        case SlidingWindow(size=size):
            yield from (Causal(), Chunked(size=size))
        case Chunked(size=size):
            yield from (Causal(), SlidingWindow(size=size))
