"""Read text and JSON files with clear errors, and write files atomically.

    settings = read_json_object(Path("config.json")); write_text(Path("config.json"), to_json(settings))

This module does not need torch, so tokenizers can be read and written without it; see `tensor_files` for tensors.
"""

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError

MAX_BYTES = 1 << 27  # Gemma 3's tokenizer.json, the largest of the common ones, has 33 million
MAX_JSON_BYTES = 1 << 22  # a config.json has a few thousand; Python needs up to 25 times the bytes of JSON as memory
MAX_JSON_TABLE_BYTES = 1 << 25  # a table of many names: DeepSeek-V3's index of shards has 9 million
_MAX_PATH_BYTES, _MAX_NAME_BYTES = 4000, 255  # below Linux's 4095, since names of files are added to a path
_UNPAIRED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # a first look; a pair of them is one valid character


def check_path_length(path: str | Path) -> None:
    """Raise ClearheadError if a text is too long for a path, such as a prompt in the place of a model."""
    parts = [len(part.encode(errors="replace")) for part in Path(path).parts]
    if sum(parts) + len(parts) > _MAX_PATH_BYTES or max(parts, default=0) > _MAX_NAME_BYTES:
        text = str(path)
        raise ClearheadError(f"{text[:40]!r}… has {len(text)} characters, too many for a path or the name of a model")


def check_regular(path: Path) -> None:
    """Raise ClearheadError for an existing pipe, device or folder, which must not be opened as a file of a model."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return  # opening it will raise the error
    if not stat.S_ISREG(mode):
        raise ClearheadError(f"{path} is not a regular file but {_describe_kind(mode)}; replace it by a file")


def _describe_kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "a device")


def read_bytes(path: Path, max_bytes: int | None = None) -> bytes:
    """Return the content of a regular file of at most `max_bytes`, by default MAX_BYTES."""
    check_regular(path)
    return _read_bounded(path, MAX_BYTES if max_bytes is None else max_bytes)


def _read_bounded(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file, pipe or device; never read more than one byte beyond the limit."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            size = status.st_size if stat.S_ISREG(status.st_mode) else 0
            content = b"" if size > max_bytes else file.read(max_bytes + 1)
    except OSError as error:
        raise ClearheadError(f"{path} cannot be read: {error.strerror}") from None
    if max(size, len(content)) > max_bytes:
        found = f"{size} bytes" if size else f"more than {max_bytes} bytes"
        raise ClearheadError(f"{path} has {found}; at most {max_bytes} can be read")
    return content


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, without the byte order mark that some editors write; a pipe is allowed."""
    return _decode(path, _read_bounded(path, MAX_BYTES))


def _decode(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ClearheadError(f"{path} is not UTF-8 text; convert it to UTF-8") from None


def read_json(path: Path, max_bytes: int | None = None) -> Any:
    """Return the JSON value in a regular file of at most `max_bytes`, by default MAX_JSON_BYTES."""
    text = _decode(path, read_bytes(path, MAX_JSON_BYTES if max_bytes is None else max_bytes))
    content = parse_json(text, f"{path} is ")
    if _UNPAIRED_SURROGATE.search(text):
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError):
            raise ClearheadError(f"{path} has an unpaired surrogate (\\ud800 to \\udfff); remove it") from None
    return content


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if the file does not exist."""
    if not path.exists():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise ClearheadError(f"{path} contains a {type(content).__name__}; it must contain a JSON object")
    return content


def parse_json(text: str, subject: str = "the text is ") -> Any:
    """Parse JSON. `subject` is the start of the error message, such as "config.json is "."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for a number of thousands of digits
        raise ClearheadError(f"{subject}not valid JSON: {error}") from None


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Provide a temporary path to write to; rename it to `path` once its content is on disk.

    After an error the temporary file is deleted and `path` keeps its old content.
    """
    partial = path.with_name(f"{path.name}.{os.urandom(4).hex()}.partial")  # several processes may write at once
    try:
        yield partial
        with partial.open("r+b") as file:  # Windows flushes only files that are open for writing
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a binary file atomically."""
    with atomic_write(path) as partial:
        partial.write_bytes(content)


def check_output_path(path: Path, extensions: Iterable[str]) -> None:
    """Raise ClearheadError unless `path` has one of these extensions and its folder exists."""
    if path.suffix.lower() not in extensions:
        raise ClearheadError(f"{path.name!r} has an unsupported extension; use {' or '.join(extensions)}")
    if not path.parent.is_dir():
        raise ClearheadError(f"the folder {str(path.parent)!r} does not exist; create it to write {path.name}")
