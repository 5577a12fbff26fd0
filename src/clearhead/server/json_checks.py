"""Check JSON values against the part of JSON Schema that the API uses. Without HTTP.

    count = check_value(3, {"type": "integer", "minimum": 1}, "n")

The same schemas make up the OpenAPI document, so that what it says and what the server accepts cannot differ.
"""

import math
from collections.abc import Mapping
from typing import Any

from clearhead.errors import quote
from clearhead.server.api_errors import ApiError, invalid

Schema = Mapping[str, Any]
_NAMES = {
    "string": ("a text", "texts"),
    "integer": ("a whole number", "whole numbers"),
    "number": ("a number", "numbers"),
    "boolean": ("true or false", "booleans"),
    "array": ("a list", "lists"),
    "object": ("an object", "objects"),
    "null": ("null", "nulls"),
}


def check_value(value: Any, schema: Schema, path: str) -> Any:
    """Return a value that a schema allows, with whole numbers as int. Raise ApiError, which names `path`, otherwise."""
    if "anyOf" in schema:
        return _check_any(value, schema["anyOf"], path)
    if "enum" in schema and not any(value == each and type(value) is type(each) for each in schema["enum"]):
        raise _wrong(value, schema, path)
    if "type" not in schema:
        return value
    if not _has_type(value, schema["type"]):
        raise _wrong(value, schema, path)
    match schema["type"]:
        case "integer":
            value = int(value)
            return _check_range(value, schema, path)
        case "number":
            return _check_range(value, schema, path)
        case "string":
            return _check_length(value, schema, path, "Length", "characters")
        case "array":
            return _check_array(value, schema, path)
        case "object":
            return _check_object(value, schema, path)
    return value


def describe(schema: Schema) -> str:
    """Return what a schema allows in a few words: "a number from 0 to 2"."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(describe, schema["anyOf"])))
    if "enum" in schema:
        return " or ".join(map(quote, schema["enum"]))
    name = _NAMES[schema["type"]][0] if "type" in schema else "any value"
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        return f"{name} greater than {schema['exclusiveMinimum']:g} and at most {high:g}"
    if low is not None:
        return f"{name} from {low} to {high}" if high is not None else f"{name}, {low} or more"
    if schema.get("minLength"):
        name += " that is not empty"
    if "items" in schema and "type" in schema["items"]:
        name = f"a list of {_NAMES[schema['items']['type']][1]}"
    return name


def _has_type(value: Any, name: str) -> bool:
    match name:
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            is_whole = isinstance(value, float) and value.is_integer()  # 16.0 is an integer in JSON
            return (isinstance(value, int) or is_whole) and not isinstance(value, bool)
        case "number":
            return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(_as_float(value))
        case "null":
            return value is None
    return isinstance(value, {"string": str, "array": list, "object": dict}[name])


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _check_range(value: Any, schema: Schema, path: str) -> Any:
    too_small = value < schema.get("minimum", value) or value <= schema.get("exclusiveMinimum", -math.inf)
    if too_small or value > schema.get("maximum", value):
        raise _wrong(value, schema, path)
    return value


def _check_length(value: Any, schema: Schema, path: str, suffix: str, unit: str) -> Any:
    low, high = schema.get(f"min{suffix}", 0), schema.get(f"max{suffix}")
    if len(value) < low:
        raise invalid(f"{path} has {len(value)} {unit}; it must have at least {low}", path)
    if high is not None and len(value) > high:
        raise invalid(f"{path} has {len(value)} {unit}; at most {high} are allowed", path)
    return value


def _check_array(value: list[Any], schema: Schema, path: str) -> list[Any]:
    _check_length(value, schema, path, "Items", "elements")
    items = schema.get("items")
    if items is None:
        return value
    if items.get("type") == "integer":  # thousands of token ids
        low, high = items.get("minimum", -math.inf), items.get("maximum", math.inf)
        if all(type(each) is int and low <= each <= high for each in value):
            return value
    return [check_value(each, items, f"{path}[{number}]") for number, each in enumerate(value)]


def _check_object(value: dict[str, Any], schema: Schema, path: str) -> dict[str, Any]:
    _check_length(value, schema, path, "Properties", "entries")
    for name, kind in schema.get("properties", {}).items():  # first, since an object of another kind has other fields
        if "enum" in kind and value.get(name) is not None:
            check_value(value[name], kind, f"{path}.{name}")
    missing = next((name for name in schema.get("required", ()) if value.get(name) is None), None)
    if missing is not None:
        instead = describe(schema["properties"][missing])
        raise invalid(f"{path}.{missing} is missing; give {instead}", f"{path}.{missing}")
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    checked = {}
    for name, each in value.items():
        if name in properties:
            checked[name] = None if each is None else check_value(each, properties[name], f"{path}.{name}")
        elif others is False and each is None:
            continue  # clients send back messages with all fields that they know
        elif others is False:
            known = ", ".join(properties)
            raise invalid(f"{path} has the unknown field {quote(name)}; it may have {known}", f"{path}.{name[:80]}")
        else:
            checked[name] = each if others is True else check_value(each, others, f"{path}.{name[:80]}")
    return checked


def _check_any(value: Any, schemas: list[Schema], path: str) -> Any:
    """Return the value if one of the schemas allows it; otherwise raise the error of the schema of its type."""
    plausible = [schema for schema in schemas if _is_plausible(value, schema)]
    errors: list[ApiError] = []
    for schema in plausible:
        try:
            return check_value(value, schema, path)
        except ApiError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    raise _wrong(value, {"anyOf": schemas}, path)


def _is_plausible(value: Any, schema: Schema) -> bool:
    """Return whether the type of a value, and of its first element, is that of a schema."""
    if "anyOf" in schema:
        return any(_is_plausible(value, each) for each in schema["anyOf"])
    if "type" not in schema:
        return True
    if not _has_type(value, schema["type"]):
        return False
    return not (schema["type"] == "array" and value and "items" in schema) or _is_plausible(value[0], schema["items"])


def _wrong(value: Any, schema: Schema, path: str) -> ApiError:
    return invalid(f"{path} is {quote(value)}; it must be {describe(schema)}", path)
