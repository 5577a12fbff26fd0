"""Read and write JSON strictly: no NaN, no endless numbers, no unpaired surrogates, no depth that ends Python.

data = parse_json(b'{"n": 2}'); content = encode_json(data)
"""

import json
from typing import Any

from clearhead.server.api_errors import invalid

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))  # json.dumps makes one per call


def parse_json(content: bytes) -> Any:
    """Return the data of a request body. Raise ApiError if it is not JSON in UTF-8."""
    try:
        text = content.decode("utf-8")
        data = json.loads(text, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise invalid("the body of the request is not UTF-8; send JSON in UTF-8") from None
    except RecursionError:
        raise invalid("the body of the request is nested too deeply; send flatter JSON") from None
    except ValueError as error:
        place = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise invalid(f"the body of the request is not valid JSON{place}; send a JSON object") from None
    if "\\u" in text or "\\U" in text:
        _check_surrogates(data)
    return data


def encode_json(data: Any) -> bytes:
    """Return compact JSON in UTF-8."""
    text = _ENCODER.encode(data)
    return text.encode("utf-8", "backslashreplace")  # an unpaired surrogate becomes its JSON escape


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_surrogates(data: Any) -> None:
    """Raise ApiError if a string has half of a surrogate pair, which is not valid text."""
    try:
        json.dumps(data, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise invalid(
            "the body of the request has an unpaired surrogate (\\ud800 to \\udfff); send whole characters"
        ) from None
