"""Small files whole: of a size that can be, in UTF-8, sound as JSON; a clear sentence for one that is not.

    settings = read_object(Path("config.json")); write_text(Path("config.json"), to_json(settings))

Nothing here needs torch, so that a tokenizer is read without it.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError

MAX_BYTES = 1 << 27  # Gemma 3's tokenizer.json, the largest of the common ones, has 33 million


def read_bytes(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ClearheadError(f"{path} has {size} bytes; at most {MAX_BYTES} can be read")
        return path.read_bytes()
    except OSError as error:
        raise ClearheadError(f"{path} cannot be read: {error.strerror}") from None


def read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError:
        raise ClearheadError(f"{path} is not UTF-8 text") from None


def read_json(path: Path) -> Any:
    return parse_json(read_text(path), f"{path} is ")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no such file."""
    if not path.exists():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise ClearheadError(f"{path} holds {type(content).__name__}, where an object is needed")
    return content


def parse_json(text: str, subject: str = "") -> Any:
    """`subject` opens the sentence of the error."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits, too
        raise ClearheadError(f"{subject}not valid JSON: {error}") from None


def write_text(path: Path, text: str) -> None:
    """All of it or nothing."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def check_output(path: Path, kinds: Iterable[str]) -> None:
    """Before long work: the name of a file to write ends in one of `kinds`, and there is a folder for it."""
    if path.suffix.lower() not in kinds:
        raise ClearheadError(f"{path.name!r} says no kind of file; give a name that ends in {', '.join(kinds)}")
    if not path.parent.is_dir():
        raise ClearheadError(f"there is no folder {str(path.parent)!r} to write {path.name} into")
