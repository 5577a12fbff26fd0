"""Mutation testing of the parity tests: all configs that differ from the correct one in a single field.

for path, wrong_config in mutants(config): ...   # path is the field, such as decoder.layers[0].attention.scale

A comparison of logits proves something only if it fails for a wrong config; `check_mutants` tries them all.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
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

# Fields that do not affect the logits of a forward pass in float32 -> the reason
WITHOUT_EFFECT = {
    "context": "states what the model was trained for",
    "dropout": "affects training only",
    "initial": "affects new networks only",
    "pooler": "is not part of the logits",
    "scale_in_float32": "matters in half precision only",
}
# Fields that may be None -> a number to try instead
INSTEAD_OF_NONE: dict[str, Any] = {"softcap": 2.0, "clip": 0.3, "scale": 0.9, "renormalize_epsilon": 1e-20}


hints_of = cache(get_type_hints)


def mutants(config: ModelConfig) -> Iterator[tuple[str, ModelConfig]]:
    """Yield (path of the changed field, config with that change) for every single change."""
    yield from mutate_part(config, "")


def mutate_part(part: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every version of a dataclass with one change in one of its fields, or deeper inside."""
    hints = hints_of(type(part))
    for field in fields(part):
        if field.name in WITHOUT_EFFECT:
            continue
        value, field_path = getattr(part, field.name), f"{path}.{field.name}".lstrip(".")
        for mutant_path, mutated in mutate_value(field.name, value, hints[field.name], field_path):
            try:
                yield mutant_path, replace(part, **{field.name: mutated})
            except ClearheadError:
                continue  # the config itself rejects this value


def mutate_value(name: str, value: Any, hint: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, changed value) for one field, according to its type."""
    if isinstance(value, tuple) and not is_dataclass(value[0]):  # the factors of LongRoPE
        for index, number in enumerate(value):
            yield f"{path}[{index}]", (*value[:index], number * 1.05, *value[index + 1 :])
    elif isinstance(value, tuple):  # the layers of a stack; equal layers change together
        for index, layer in enumerate(dict.fromkeys(value)):
            for mutant_path, mutated in mutate_part(layer, f"{path}[{index}]"):
                yield mutant_path, tuple(mutated if other == layer else other for other in value)
    elif is_dataclass(value):
        yield from mutate_part(value, path)
        for other in other_choices(value, hint):
            yield f"{path}: {type(other).__name__}", other
        if dataclass_choices(hint)[1] and name != "head":  # without a head there are no logits
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
    """Yield values of other types that fit the field and need no further numbers."""
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
