"""Files: small ones read whole, in UTF-8 and sound as JSON or with a clear sentence; all of them written whole.

    settings = read_object(Path("config.json")); write_text(Path("config.json"), to_json(settings))

Only tensors need torch, so that a tokenizer is read and written without it.
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
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ClearheadError(f"{path} has {size} bytes; at most {MAX_BYTES} can be read")
        return path.read_bytes()
    except OSError as error:
        raise ClearheadError(f"{path} cannot be read: {error.strerror}") from None


def read_text(path: Path) -> str:
    """Without the mark that some editors put before UTF-8."""
    try:
        return read_bytes(path).decode("utf-8-sig")
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


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Another name to write a file under; it gets its own once all of it is on the disk, and goes after an error."""
    partial = path.with_name(f"{path.name}.{os.urandom(4).hex()}.partial")  # several may write it at once
    try:
        yield partial
        with partial.open("r+b") as file:  # Windows flushes only what is open for writing
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_bytes(path: Path, content: bytes) -> None:
    with atomic_write(path) as partial:
        partial.write_bytes(content)


def write_safetensors(path: Path, tensors: "dict[str, Tensor]", metadata: dict[str, str] | None = None) -> None:
    """Readable by whoever may read the folder's other files; safetensors itself would leave it to its owner alone."""
    from safetensors.torch import save_file

    with atomic_write(path) as partial:
        partial.touch()
        mode = partial.stat().st_mode
        save_file(tensors, partial, metadata=metadata)
        partial.chmod(mode)


def check_output(path: Path, kinds: Iterable[str]) -> None:
    """Before long work: the name of a file to write ends in one of `kinds`, and there is a folder for it."""
    if path.suffix.lower() not in kinds:
        raise ClearheadError(f"{path.name!r} says no kind of file; give a name that ends in {', '.join(kinds)}")
    if not path.parent.is_dir():
        raise ClearheadError(f"there is no folder {str(path.parent)!r} to write {path.name} into")
