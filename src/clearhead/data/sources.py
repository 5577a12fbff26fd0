"""Read texts from files: plain text, JSON lines, CSV, two parallel files and tab-separated tables, also as .gz.

    for text in read_texts("books", unit="file"): ...
    pairs = read_parallel("train.en.gz", "train.de.gz")

A file that cannot be read raises a ClearheadError with its name and the line or byte.
"""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from io import BufferedIOBase, BufferedReader, RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from clearhead.data.chats import Chat, to_messages
from clearhead.errors import ClearheadError, unknown_name
from clearhead.files import parse_json

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer as Buffer

_SUFFIXES = (".txt", ".jsonl")  # files that are read from a folder, with or without .gz
_CHAT_SUFFIXES = (".jsonl", ".csv")
_BYTE_ORDER_MARK = "\ufeff"  # some editors write it at the start of a file
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can contain an unpaired one, but no tokenizer can encode it
MAX_EXPANSION = 32  # of a gzip file; text shrinks to a third or a tenth
FREE_EXPANSION_BYTES = 1 << 26  # small files may expand more
T = TypeVar("T")
Unit = Literal["file", "paragraph", "line"]
Pair = tuple[str, str]


def _find_files(path: str | Path, suffixes: Sequence[str] = _SUFFIXES) -> list[Path]:
    """Return the file itself, or all text files below a folder, sorted by name."""
    path = Path(path)
    if not path.exists():
        raise ClearheadError(f"{path} does not exist; give a text file or a folder of text files")
    if not path.is_dir():  # a file or a pipe
        return [path]
    files = sorted(file for file in path.rglob("*") if file.is_file() and _suffix(file) in suffixes)
    if not files:
        raise ClearheadError(
            f"{path} contains no {' or '.join(suffixes)} file, with or without .gz; give a folder that does, or a file"
        )
    return files


def read_texts(path: str | Path, unit: Unit = "file", field: str = "text") -> Iterator[str]:
    """Yield the documents of a file or folder. Empty ones are skipped.

    `unit` says what a document is in a text file: the file, a paragraph (separated by empty lines) or a line. In JSON
    lines each line is a document, and `field` is the key of its text.
    """
    if unit not in get_args(Unit):
        raise unknown_name("unit", unit, get_args(Unit))
    for file in _find_files(path):
        texts: Iterator[str]
        if _suffix(file) == ".jsonl":
            texts = (_text_field(entry, field, f"line {number} of {file}") for number, entry in read_json_lines(file))
        elif unit == "line":
            texts = read_lines(file)
        elif unit == "paragraph":
            texts = _paragraphs(read_lines(file))
        else:
            texts = iter([read_text(file)])
        yield from (text for text in texts if text.strip())


def read_parallel(source: str | Path, target: str | Path) -> list[Pair]:
    """Return pairs of line n of one file and line n of the other."""
    sources, targets = list(read_lines(source)), list(read_lines(target))
    if len(sources) != len(targets):
        raise ClearheadError(
            f"{source} has {len(sources)} lines and {target} has {len(targets)};"
            " both files need the same number of lines, since line n of one belongs to line n of the other"
        )
    return _require_rows(list(zip(sources, targets, strict=True)), source)


def read_table(path: str | Path, source_column: int = 0, target_column: int = 1, header: bool = False) -> list[Pair]:
    """Return two columns of a .csv file or of a tab-separated file, numbered from 0. Empty lines are skipped.

    With `header`, the first line names the columns and is not a pair.
    """
    if _suffix(Path(path)) == ".csv":
        rows, separated = _read_csv(path), "comma-separated"
    else:
        separated = "tab-separated"
        rows = ((number, line.split("\t")) for number, line in enumerate(read_lines(path), start=1) if line)
    pairs = []
    for number, cells in rows:
        if len(cells) <= max(source_column, target_column):
            raise ClearheadError(
                f"line {number} of {path} has {len(cells)} {separated} columns, but columns {source_column} and"
                f" {target_column}, numbered from 0, were requested; choose others, or correct the line"
            )
        pairs.append((cells[source_column], cells[target_column]))
    return _require_rows(pairs[1:] if header else pairs, path)


def read_chats(path: str | Path) -> list[Chat]:
    """Return the chats of a JSON lines or CSV file, or of a folder of them; see `chats.to_messages` for the formats."""
    chats: list[Chat] = []
    for file in _find_files(path, _CHAT_SUFFIXES):
        entries = _read_csv_entries(file) if _suffix(file) == ".csv" else read_json_lines(file)
        chats += [to_messages(entry, f"line {number} of {file}") for number, entry in entries]
    return _require_rows(chats, path)


def _read_csv_entries(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a CSV file as objects, with the numbers of their last lines. The first line names the keys."""
    names: list[str] | None = None
    for number, cells in _read_csv(path):
        if names is None:
            names = [cell.strip() for cell in cells]
        elif len(cells) != len(names):
            raise ClearheadError(
                f"line {number} of {path} has {len(cells)} cells, but the first line has {len(names)}; correct the line"
            )
        else:
            yield number, dict(zip(names, cells, strict=True))


def _read_csv(path: str | Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV file with the numbers of their last lines. Empty lines are skipped."""
    rows = csv.reader((f"{line}\n" for line in read_lines(path)), strict=True)
    try:
        for cells in rows:
            if cells:
                yield rows.line_num, cells
    except csv.Error as error:
        raise ClearheadError(f"line {rows.line_num} of {path} is not valid CSV: {error}; correct it") from None


def read_json_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a JSON lines file with their line numbers, from 1. Empty lines are skipped."""
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        entry = parse_json(line, f"line {number} of {path} is ")
        if not isinstance(entry, dict):
            raise ClearheadError(
                f'line {number} of {path} is not a JSON object; each line must be one, such as {{"text": "…"}}'
            )
        if "\\ud" in line.lower() and _SURROGATE.search(json.dumps(entry, ensure_ascii=False)):
            raise ClearheadError(f"line {number} of {path} has an unpaired surrogate (\\ud800 to \\udfff); remove it")
        yield number, entry


def read_lines(path: str | Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file without their line breaks. Only \\n and \\r\\n end a line."""
    offset = 0
    with _readable(path) as file:
        for line in file:
            text = _decode(line.removesuffix(b"\n").removesuffix(b"\r"), path, offset)
            yield text if offset else text.removeprefix(_BYTE_ORDER_MARK)
            offset += len(line)


def read_text(path: str | Path) -> str:
    """Return the text of a UTF-8 file, with its line breaks unchanged."""
    with _readable(path) as file:
        return _decode(file.read(), path).removeprefix(_BYTE_ORDER_MARK)


def _decode(content: bytes, path: str | Path, offset: int = 0) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        byte, position = content[error.start], offset + error.start
        raise ClearheadError(
            f"{path} is not UTF-8 text: byte {byte:#04x} at offset {position}; convert it to UTF-8"
        ) from None


@contextmanager
def _readable(path: str | Path) -> Iterator[BufferedIOBase]:
    try:
        with _open(Path(path)) as file:
            yield file
    except (EOFError, zlib.error) as error:
        raise ClearheadError(f"{path} is not a complete gzip file: {error}; compress or download it again") from None
    except OSError as error:  # gzip also raises it for a file that is not compressed
        raise ClearheadError(f"{path} cannot be read: {error.strerror or error}") from None


def _open(path: Path) -> AbstractContextManager[BufferedIOBase]:
    if path.is_char_device() or path.is_block_device():
        raise ClearheadError(f"{path} is a device and may never end; give a file or a pipe")
    return BufferedReader(_BoundedGzip(path)) if path.suffix.lower() == ".gz" else path.open("rb")


class _BoundedGzip(RawIOBase):
    """The content of a gzip file, up to a limit: a small file can expand to a thousand times its size."""

    def __init__(self, path: Path) -> None:
        self._path, self._num_bytes = path, 0
        self._file = gzip.open(path, "rb")  # noqa: SIM115  (closed by `close`)
        self._max_bytes = MAX_EXPANSION * path.stat().st_size + FREE_EXPANSION_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "Buffer") -> int:
        view = memoryview(buffer)
        chunk = self._file.read(len(view))
        view[: len(chunk)] = chunk
        self._num_bytes += len(chunk)
        if self._num_bytes > self._max_bytes:
            raise ClearheadError(
                f"{self._path} expands to more than {self._max_bytes:,} bytes, over {MAX_EXPANSION} times its size;"
                " if that is intended, decompress it and give the file without .gz"
            )
        return len(chunk)

    def close(self) -> None:
        self._file.close()
        super().close()


def _suffix(path: Path) -> str:
    """Return the suffix in lower case, without .gz."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _paragraphs(lines: Iterator[str]) -> Iterator[str]:
    paragraph: list[str] = []
    for line in lines:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield "\n".join(paragraph)
            paragraph = []
    if paragraph:
        yield "\n".join(paragraph)


def _text_field(entry: Mapping[str, Any], field: str, where: str) -> str:
    text = entry.get(field)
    if not isinstance(text, str):
        raise ClearheadError(f"{where} has no text under the key {field!r}; its keys are: {', '.join(entry)}")
    return text


def _require_rows(rows: list[T], path: str | Path) -> list[T]:
    if not rows:
        raise ClearheadError(f"{path} is empty; it must contain at least one entry")
    return rows
