"""Files to texts: plain text, JSON lines, two parallel files, tab-separated tables; .gz of each.

    for text in read_texts("books", unit="file"): ...
    pairs = read_parallel("train.en.gz", "train.de.gz")

What cannot be read is an error that names the file and the place in it.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from clearhead.errors import ClearheadError, unknown_name
from clearhead.files import parse_json

SUFFIXES = (".txt", ".jsonl")  # of the files that are read in a folder, with or without .gz
BYTE_ORDER_MARK = "\ufeff"  # which some editors write first
HALF_CHARACTER = re.compile("[\ud800-\udfff]")  # JSON can spell it, no tokenizer can read it
T = TypeVar("T")
Unit = Literal["file", "paragraph", "line"]
Pair = tuple[str, str]
Chat = Sequence[Mapping[str, object]]


def find_files(path: str | Path) -> list[Path]:
    """The file itself, or all text files below a folder, in the order of their names."""
    path = Path(path)
    if not path.exists():
        raise ClearheadError(f"{path} does not exist; give a text file or a folder of text files")
    if not path.is_dir():  # a pipe too
        return [path]
    found = sorted(file for file in path.rglob("*") if file.is_file() and _kind(file) in SUFFIXES)
    if not found:
        raise ClearheadError(f"{path} holds no file to read; looked for {', '.join(SUFFIXES)} and the same with .gz")
    return found


def read_texts(path: str | Path, unit: Unit = "file", field: str = "text") -> Iterator[str]:
    """The documents of a file or folder, none empty: each file, paragraph (between empty lines) or line is one.

    In JSON lines each line is one, whose text is `field`.
    """
    if unit not in get_args(Unit):
        raise unknown_name("unit", unit, get_args(Unit))
    for file in find_files(path):
        texts: Iterator[str]
        if _kind(file) == ".jsonl":
            texts = (_text_of(entry, field, f"line {number} of {file}") for number, entry in read_json_lines(file))
        elif unit == "line":
            texts = read_lines(file)
        elif unit == "paragraph":
            texts = _paragraphs(read_lines(file))
        else:
            texts = iter([read_text(file)])
        yield from (text for text in texts if text.strip())


def read_parallel(source: str | Path, target: str | Path) -> list[Pair]:
    """Line n of one file and line n of the other."""
    sources, targets = list(read_lines(source)), list(read_lines(target))
    if len(sources) != len(targets):
        raise ClearheadError(
            f"{source} has {len(sources)} lines and {target} has {len(targets)};"
            " line n of one is the translation of line n of the other"
        )
    return _not_empty(list(zip(sources, targets, strict=True)), source)


def read_table(path: str | Path, source_column: int = 0, target_column: int = 1) -> list[Pair]:
    """Two columns of a tab-separated file, counted from 0; empty lines are left out."""
    pairs = []
    for number, line in enumerate(read_lines(path), start=1):
        if not line:
            continue
        cells = line.split("\t")
        if len(cells) <= max(source_column, target_column):
            raise ClearheadError(
                f"line {number} of {path} has {len(cells)} tab-separated columns;"
                f" columns {source_column} and {target_column}, counted from 0, are asked for"
            )
        pairs.append((cells[source_column], cells[target_column]))
    return _not_empty(pairs, path)


def read_chats(path: str | Path) -> list[Chat]:
    """JSON lines, each with `messages`: a list of objects with a `role` and a `content`."""
    chats: list[Chat] = []
    for file in find_files(path):
        for number, entry in read_json_lines(file):
            messages = entry.get("messages")
            if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
                raise ClearheadError(f'line {number} of {file} has no "messages", each with a role and a content')
            chats.append(messages)
    return _not_empty(chats, path)


def read_json_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file with their line numbers, counted from 1."""
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        entry = parse_json(line, f"line {number} of {path} is ")
        if not isinstance(entry, dict):
            raise ClearheadError(f"line {number} of {path} is not a JSON object")
        if "\\ud" in line.lower() and HALF_CHARACTER.search(json.dumps(entry, ensure_ascii=False)):
            raise ClearheadError(f"line {number} of {path} has half a character (\\ud800 to \\udfff); mend it")
        yield number, entry


def read_lines(path: str | Path) -> Iterator[str]:
    """Lines of a UTF-8 file without their ends; only \\n and \\r\\n end a line."""
    offset = 0
    with _readable(path) as file:
        for line in file:
            text = _decode(line.removesuffix(b"\n").removesuffix(b"\r"), path, offset)
            yield text if offset else text.removeprefix(BYTE_ORDER_MARK)
            offset += len(line)


def read_text(path: str | Path) -> str:
    """All characters of a UTF-8 file, as they are."""
    with _readable(path) as file:
        return _decode(file.read(), path).removeprefix(BYTE_ORDER_MARK)


def _decode(content: bytes, path: str | Path, offset: int = 0) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        byte, place = content[error.start], offset + error.start
        raise ClearheadError(f"{path} is not UTF-8 text: byte {byte:#04x} at offset {place}; convert it") from None


@contextmanager
def _readable(path: str | Path) -> Iterator[BufferedIOBase]:
    try:
        with _open(Path(path)) as file:
            yield file
    except (EOFError, zlib.error) as error:
        raise ClearheadError(f"{path} is not a whole gzip file: {error}") from None
    except OSError as error:  # also what gzip raises for a file that is none
        raise ClearheadError(f"{path} cannot be read: {error.strerror or error}") from None


def _open(path: Path) -> AbstractContextManager[BufferedIOBase]:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")


def _kind(path: Path) -> str:
    """The suffix in small letters, .gz apart."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _paragraphs(lines: Iterator[str]) -> Iterator[str]:
    gathered: list[str] = []
    for line in lines:
        if line.strip():
            gathered.append(line)
        elif gathered:
            yield "\n".join(gathered)
            gathered = []
    if gathered:
        yield "\n".join(gathered)


def _text_of(entry: Mapping[str, Any], field: str, where: str) -> str:
    text = entry.get(field)
    if not isinstance(text, str):
        raise ClearheadError(f"{where} has no text under {field!r}; its keys are: {', '.join(entry)}")
    return text


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message


def _not_empty(rows: list[T], path: str | Path) -> list[T]:
    if not rows:
        raise ClearheadError(f"{path} is empty; there is nothing to read")
    return rows
