"""Read text and JSON files with clear errors, and write files atomically.

    settings = read_json_object(Path("config.json")); write_text(Path("config.json"), to_json(settings))

Only `write_safetensors` needs torch, so tokenizers can be read and written without it.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.errors import ClearheadError

if TYPE_CHECKING:
    from torch import Tensor

MAX_BYTES = 1 << 27  # Gemma 3's tokenizer.json, the largest of the common ones, has 33 million


def read_bytes(path: Path) -> bytes:
    """Return the content of a file of at most MAX_BYTES."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ClearheadError(f"{path} has {size} bytes; at most {MAX_BYTES} can be read")
        return path.read_bytes()
    except OSError as error:
        raise ClearheadError(f"{path} cannot be read: {error.strerror}") from None


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, without the byte order mark that some editors write."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ClearheadError(f"{path} is not UTF-8 text; convert it to UTF-8") from None


def read_json(path: Path) -> Any:
    """Return the JSON value in a file."""
    return parse_json(read_text(path), f"{path} is ")


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


def write_safetensors(path: Path, tensors: "dict[str, Tensor]", metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically, with the default permissions of new files.

    The safetensors library itself would make it readable by its owner only.
    """
    from safetensors.torch import save_file

    with atomic_write(path) as partial:
        partial.touch()
        mode = partial.stat().st_mode
        save_file(tensors, partial, metadata=metadata)
        partial.chmod(mode)


def check_output_path(path: Path, extensions: Iterable[str]) -> None:
    """Raise ClearheadError unless `path` has one of these extensions and its folder exists."""
    if path.suffix.lower() not in extensions:
        raise ClearheadError(f"{path.name!r} has an unsupported extension; use {' or '.join(extensions)}")
    if not path.parent.is_dir():
        raise ClearheadError(f"the folder {str(path.parent)!r} does not exist; create it to write {path.name}")
