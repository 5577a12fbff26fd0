"""Token files for corpora larger than memory: written once, then read in place.

    write_shards("corpus", (document_ids(text, tokenizer) for text in texts), tokenizer)
    tokens = open_shards("corpus", tokenizer)

A folder holds

    00000.tokens  00001.tokens ...     the ids, uint16 or uint32, little endian
    00000.lengths 00001.lengths ...    the length of each document in its shard, uint32, little endian
    index.json                         sizes and sha256 of these files and the vocabulary they were written with

The index is written last, so that an unfinished folder has none. Opening compares sizes; `verify_shards` reads all.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from clearhead.config import from_json, to_json
from clearhead.data.tokens import Stored, Tokens
from clearhead.errors import ClearheadError
from clearhead.files import write_bytes, write_text
from clearhead.tokenization import Tokenizer

INDEX = "index.json"
FORMAT = "clearhead-tokens-1"
DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}  # by bytes per token
MAX_SHARD_TOKENS = 2**27  # a file of 256 or 512 MiB


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One pair of files."""

    name: str
    num_tokens: int
    num_documents: int
    tokens_sha256: str
    lengths_sha256: str


@dataclass(frozen=True, kw_only=True)
class Index:
    format: str
    bytes_per_token: int
    vocab_size: int
    vocabulary_sha256: str
    shards: tuple[Shard, ...]


def write_shards(
    folder: str | Path,
    documents: Iterable[Sequence[int]],
    tokenizer: Tokenizer,
    max_shard_tokens: int = MAX_SHARD_TOKENS,
    overwrite: bool = False,
) -> Index:
    """Write documents as they come; memory holds one shard. Those that were there stay until the new ones are whole."""
    folder = Path(folder)
    if (folder / INDEX).exists():
        if not overwrite:
            raise ClearheadError(f"{folder} holds token shards already; give another folder, or overwrite=True")
        with TemporaryDirectory(dir=folder, prefix="partial-") as beside:
            index = write_shards(beside, documents, tokenizer, max_shard_tokens)
            _remove(folder)
            for path in sorted(Path(beside).iterdir(), key=lambda path: path.name == INDEX):  # the index last
                path.replace(folder / path.name)
        return index
    folder.mkdir(parents=True, exist_ok=True)
    width = 2 if tokenizer.vocab_size <= 2**16 else 4
    gathered = _gather(documents, max_shard_tokens)
    shards = tuple(_write_shard(folder, f"{number:05}", some, width) for number, some in enumerate(gathered))
    if not shards:
        raise ClearheadError("there are no documents to write; the corpus is empty")
    index = Index(
        format=FORMAT,
        bytes_per_token=width,
        vocab_size=tokenizer.vocab_size,
        vocabulary_sha256=vocabulary_sha256(tokenizer),
        shards=shards,
    )
    write_text(folder / INDEX, to_json(index))
    return index


def open_shards(folder: str | Path, tokenizer: Tokenizer | None = None) -> Tokens:
    """The ids of all shards, left on disk. A tokenizer is compared with the one they were written with."""
    folder = Path(folder)
    index = read_index(folder)
    if tokenizer is not None:
        _check_vocabulary(folder, index, tokenizer)
    parts: list[Stored] = []
    lengths = []
    for shard in index.shards:
        tokens_path, lengths_path = _paths(folder, shard.name)
        _check_size(tokens_path, shard.num_tokens * index.bytes_per_token)
        _check_size(lengths_path, shard.num_documents * 4)
        parts.append(np.memmap(tokens_path, DTYPES[index.bytes_per_token], mode="r"))
        lengths.append(np.fromfile(lengths_path, DTYPES[4]).astype(np.int64))
        if lengths[-1].sum() != shard.num_tokens:
            raise ClearheadError(f"{lengths_path} does not add up to the {shard.num_tokens} tokens of its shard")
    return Tokens(parts, np.cumsum(np.concatenate([[0], *lengths]))[:-1])


def verify_shards(folder: str | Path) -> Index:
    """Read every byte and compare it with the index."""
    folder = Path(folder)
    open_shards(folder)
    index = read_index(folder)
    for shard in index.shards:
        for path, expected in zip(_paths(folder, shard.name), (shard.tokens_sha256, shard.lengths_sha256), strict=True):
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    raise ClearheadError(f"{path} is not what was written: its sha256 differs from {INDEX}")
    return index


def read_index(folder: Path) -> Index:
    path = folder / INDEX
    if not path.is_file():
        raise ClearheadError(f"{folder} has no {INDEX}: it holds no token shards, or writing them was cut short")
    try:
        index = from_json(Index, path.read_text(encoding="utf-8"))
    except ValueError as error:  # a ClearheadError or bytes that are not UTF-8
        raise ClearheadError(f"{path} cannot be read: {error}") from None
    sound = index.shards and all(shard.name.isdecimal() and shard.num_tokens > 0 for shard in index.shards)
    if index.format != FORMAT or index.bytes_per_token not in DTYPES or not sound:
        raise ClearheadError(f"{path} is not of the format {FORMAT}")
    return index


def vocabulary_sha256(tokenizer: Tokenizer) -> str:
    """Of all tokens in order: two vocabularies of one size need not be the same."""
    texts = [tokenizer.token_text(token_id) for token_id in range(tokenizer.vocab_size)]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _remove(folder: Path) -> None:
    """The index first, so that no half of the shards is ever taken for all."""
    shards = [path for pattern in ("*.tokens", "*.lengths") for path in folder.glob(pattern) if path.stem.isdecimal()]
    for path in (folder / INDEX, *shards):
        path.unlink()


def _gather(documents: Iterable[Sequence[int]], max_tokens: int) -> Iterator[list[Stored]]:
    gathered: list[Stored] = []
    num_tokens = 0
    for document in filter(len, documents):
        if gathered and num_tokens + len(document) > max_tokens:
            yield gathered
            gathered, num_tokens = [], 0
        gathered.append(np.asarray(document, dtype=np.uint32))  # a list would be eight times as large
        num_tokens += len(document)
    if gathered:
        yield gathered


def _write_shard(folder: Path, name: str, documents: list[Stored], bytes_per_token: int) -> Shard:
    tokens = np.concatenate(documents).astype(DTYPES[bytes_per_token]).tobytes()
    lengths = np.array([len(document) for document in documents], DTYPES[4]).tobytes()
    for path, content in zip(_paths(folder, name), (tokens, lengths), strict=True):
        write_bytes(path, content)
    return Shard(
        name=name,
        num_tokens=len(tokens) // bytes_per_token,
        num_documents=len(documents),
        tokens_sha256=hashlib.sha256(tokens).hexdigest(),
        lengths_sha256=hashlib.sha256(lengths).hexdigest(),
    )


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.tokens", folder / f"{name}.lengths"


def _check_size(path: Path, expected_bytes: int) -> None:
    found = path.stat().st_size if path.is_file() else 0
    if found != expected_bytes:
        raise ClearheadError(f"{path} has {found} bytes, {INDEX} says {expected_bytes}; write the shards again")


def _check_vocabulary(folder: Path, index: Index, tokenizer: Tokenizer) -> None:
    if index.vocab_size != tokenizer.vocab_size:
        raise ClearheadError(
            f"{folder} was written with a vocabulary of {index.vocab_size} tokens, the tokenizer has"
            f" {tokenizer.vocab_size}; use the tokenizer they were written with"
        )
    if index.vocabulary_sha256 != vocabulary_sha256(tokenizer):
        raise ClearheadError(f"{folder} was written with another vocabulary of the same size as the tokenizer's")
