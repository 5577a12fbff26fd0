"""What the tables of fields are made of: a field with its JSON Schema, and the schemas that many fields share.

table = {"n": Field(whole(1, 64), "Number of texts."), "audio": refused("models here write text only")}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
BOOLEAN = {"type": "boolean"}
STRING = {"type": "string"}
TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}


@dataclass(frozen=True)
class Field:
    """A field of a request."""

    schema: Mapping[str, Any]
    description: str
    unsupported: str | None = None  # why values that the schema does not allow are refused
    required: bool = False


Table = dict[str, Field]


def number(low: float, high: float) -> dict[str, Any]:
    """Return the schema of a number in a range."""
    return {"type": "number", "minimum": low, "maximum": high}


def whole(low: int, high: int) -> dict[str, Any]:
    """Return the schema of a whole number in a range."""
    return {"type": "integer", "minimum": low, "maximum": high}


def refused(reason: str, *allowed: Any) -> Field:
    """Return a field that is not supported; only the allowed values, which change nothing, are accepted."""
    return Field({"enum": list(allowed)}, f"Not supported: {reason}", unsupported=reason)
