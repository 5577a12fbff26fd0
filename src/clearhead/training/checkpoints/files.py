"""Write the files of a checkpoint. Every write, fsync and rename goes through one small object, which tests replace.

    digest = write_file(FileSystem(), path, safetensors_chunks({"weight": tensor}, {}))

A checkpoint becomes visible when its folder is renamed, so its files need no temporary names as in `clearhead.files`.
Tensors are written one after another, so that a save needs extra memory for one tensor and not for all of them.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

READ_BYTES = 2**20

# The names of dtypes in the safetensors format.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class FileSystem:
    """The operations that a save performs on the disk."""

    def write(self, file: BinaryIO, chunk: bytes | memoryview) -> None:
        """Append a chunk to an open file."""
        file.write(chunk)

    def fsync(self, descriptor: int) -> None:
        """Wait until the file or folder is on the disk."""
        os.fsync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder atomically."""
        os.rename(old, new)


@dataclass(frozen=True)
class FileDigest:
    """Size and checksum of a file."""

    num_bytes: int
    sha256: str


def write_file(file_system: FileSystem, path: Path, chunks: Iterable[bytes | memoryview]) -> FileDigest:
    """Write a new file and fsync it. Its name is on disk after `sync_folder` of its folder."""
    sha256, num_bytes = hashlib.sha256(), 0
    with path.open("wb") as file:
        for chunk in chunks:
            file_system.write(file, chunk)
            sha256.update(chunk)
            num_bytes += len(chunk)
        file.flush()
        file_system.fsync(file.fileno())
    return FileDigest(num_bytes, sha256.hexdigest())


def digest_file(path: Path) -> FileDigest:
    """Read a file and return its size and checksum."""
    sha256, num_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            sha256.update(chunk)
            num_bytes += len(chunk)
    return FileDigest(num_bytes, sha256.hexdigest())


def sync_folder(file_system: FileSystem, folder: Path) -> None:
    """Write the entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        file_system.fsync(descriptor)
    finally:
        os.close(descriptor)


def safetensors_chunks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file in pieces: the length of the header, the header, and the data of each tensor."""
    # Readers map the data into memory, so each tensor must begin at a multiple of its element size: the widest come
    # first. Tensors of equal element size are sorted by name, so that equal tensors give equal files.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text))
    yield text
    for _, tensor in ordered:
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
