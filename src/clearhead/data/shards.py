"""Write and read token shards: files of token ids for corpora that are larger than memory.

    write_shards("corpus", (document_ids(text, tokenizer) for text in texts), tokenizer)
    tokens = open_shards("corpus", tokenizer)

A folder contains

    00000.tokens  00001.tokens ...     the ids, uint16 or uint32, little endian
    00000.lengths 00001.lengths ...    the length of each document of the shard, uint32, little endian
    index.json                         sizes and sha256 of these files, and of the vocabulary they were written with

The index is written last, so an incomplete folder has none. Opening shards compares sizes; `verify_shards` reads
everything.
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
from clearhead.data.tokens import StoredIds, Tokens
from clearhead.errors import ClearheadError
from clearhead.files import read_text, write_bytes, write_text
from clearhead.tokenization import Tokenizer

INDEX_FILE = "index.json"
FORMAT = "clearhead-tokens-1"
DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}  # by bytes per token
_MAX_SHARD_TOKENS = 2**27  # a file of 256 or 512 MiB


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One pair of a .tokens and a .lengths file."""

    name: str
    num_tokens: int
    num_documents: int
    tokens_sha256: str
    lengths_sha256: str


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """The content of index.json."""

    format: str
    bytes_per_token: int
    vocab_size: int
    vocabulary_sha256: str
    shards: tuple[Shard, ...]


def write_shards(
    folder: str | Path,
    documents: Iterable[Sequence[int]],
    tokenizer: Tokenizer,
    max_shard_tokens: int = _MAX_SHARD_TOKENS,
    overwrite: bool = False,
) -> ShardIndex:
    """Write documents as they arrive, with one shard at a time in memory, and return the index.

    With `overwrite`, existing shards are replaced after all new ones have been written.
    """
    folder = Path(folder)
    if (folder / INDEX_FILE).exists():
        if not overwrite:
            raise ClearheadError(
                f"{folder} already contains token shards; choose another folder, or replace them with overwrite=True"
            )
        with TemporaryDirectory(dir=folder, prefix="partial-") as partial:
            index = write_shards(partial, documents, tokenizer, max_shard_tokens)
            _remove_shards(folder)
            for path in sorted(Path(partial).iterdir(), key=lambda path: path.name == INDEX_FILE):  # the index last
                path.replace(folder / path.name)
        return index
    folder.mkdir(parents=True, exist_ok=True)
    bytes_per_token = 2 if tokenizer.vocab_size <= 2**16 else 4
    groups = _group_documents(documents, max_shard_tokens)
    shards = tuple(_write_shard(folder, f"{number:05}", group, bytes_per_token) for number, group in enumerate(groups))
    if not shards:
        raise ClearheadError("the corpus is empty; shards need at least one document")
    index = ShardIndex(
        format=FORMAT,
        bytes_per_token=bytes_per_token,
        vocab_size=tokenizer.vocab_size,
        vocabulary_sha256=_vocabulary_sha256(tokenizer),
        shards=shards,
    )
    write_text(folder / INDEX_FILE, to_json(index))
    return index


def open_shards(folder: str | Path, tokenizer: Tokenizer | None = None) -> Tokens:
    """Return the ids of all shards, which stay on disk.

    Raise ClearheadError if a file is damaged, or if a tokenizer is given that did not write them.
    """
    folder = Path(folder)
    index = read_index(folder)
    if tokenizer is not None:
        _check_vocabulary(folder, index, tokenizer)
    parts: list[StoredIds] = []
    lengths = []
    for shard in index.shards:
        tokens_path, lengths_path = _paths(folder, shard.name)
        _check_size(tokens_path, shard.num_tokens * index.bytes_per_token)
        _check_size(lengths_path, shard.num_documents * 4)
        parts.append(np.memmap(tokens_path, DTYPES[index.bytes_per_token], mode="r"))
        lengths.append(np.fromfile(lengths_path, DTYPES[4]).astype(np.int64))
        if lengths[-1].sum() != shard.num_tokens:
            raise ClearheadError(
                f"the lengths in {lengths_path} do not add up to the {shard.num_tokens} tokens of its shard;"
                " write the shards again"
            )
    return Tokens(parts, np.cumsum(np.concatenate([[0], *lengths]))[:-1], vocab_size=index.vocab_size)


def verify_shards(folder: str | Path) -> ShardIndex:
    """Read every byte, raise ClearheadError if one differs from what was written, and return the index."""
    folder = Path(folder)
    open_shards(folder)
    index = read_index(folder)
    for shard in index.shards:
        for path, expected in zip(_paths(folder, shard.name), (shard.tokens_sha256, shard.lengths_sha256), strict=True):
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    raise ClearheadError(
                        f"{path} is damaged: its sha256 differs from {INDEX_FILE}; write the shards again"
                    )
    return index


def read_index(folder: Path) -> ShardIndex:
    """Read and check the index of a folder of shards."""
    path = folder / INDEX_FILE
    if not path.is_file():
        raise ClearheadError(
            f"{folder} has no {INDEX_FILE}: it contains no token shards, or writing them was "
            "interrupted; `clearhead shards write` writes them"
        )
    try:
        index = from_json(ShardIndex, read_text(path))
    except ClearheadError as error:
        raise ClearheadError(f"{path} cannot be read: {error}") from None
    valid = index.shards and all(shard.name.isdecimal() and shard.num_tokens > 0 for shard in index.shards)
    if index.format != FORMAT or index.bytes_per_token not in DTYPES or not valid:
        raise ClearheadError(f"{path} does not have the format {FORMAT}; write the shards again")
    return index


def _vocabulary_sha256(tokenizer: Tokenizer) -> str:
    """Return the sha256 of all tokens in order, since vocabularies of equal size can differ."""
    texts = [tokenizer.token_text(token_id) for token_id in range(tokenizer.vocab_size)]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _remove_shards(folder: Path) -> None:
    """Delete the index first, so that a part of the shards can never pass for all of them."""
    shards = [path for pattern in ("*.tokens", "*.lengths") for path in folder.glob(pattern) if path.stem.isdecimal()]
    for path in (folder / INDEX_FILE, *shards):
        path.unlink()


def _group_documents(documents: Iterable[Sequence[int]], max_tokens: int) -> Iterator[list[StoredIds]]:
    """Yield groups of documents with at most `max_tokens` tokens, or one longer document. Empty ones are skipped."""
    group: list[StoredIds] = []
    num_tokens = 0
    for document in filter(len, documents):
        if group and num_tokens + len(document) > max_tokens:
            yield group
            group, num_tokens = [], 0
        group.append(np.asarray(document, dtype=np.uint32))  # a list would take eight times as much memory
        num_tokens += len(document)
    if group:
        yield group


def _write_shard(folder: Path, name: str, documents: list[StoredIds], bytes_per_token: int) -> Shard:
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
    num_bytes = path.stat().st_size if path.is_file() else 0
    if num_bytes != expected_bytes:
        raise ClearheadError(
            f"{path} has {num_bytes} bytes, but {INDEX_FILE} lists {expected_bytes}; write the shards again"
        )


def _check_vocabulary(folder: Path, index: ShardIndex, tokenizer: Tokenizer) -> None:
    if index.vocab_size != tokenizer.vocab_size:
        raise ClearheadError(
            f"{folder} was written with a vocabulary of {index.vocab_size} tokens, but the tokenizer has"
            f" {tokenizer.vocab_size}; use the tokenizer that wrote the shards"
        )
    if index.vocabulary_sha256 != _vocabulary_sha256(tokenizer):
        raise ClearheadError(
            f"{folder} was written with another vocabulary of the same size; use the tokenizer that wrote the shards"
        )
