"""How a checkpoint's bytes reach the disk: every write, fsync and rename passes through one small object.

    written = put(Files(), path, tensor_chunks({"weight": tensor}, {}))      # a safetensors file, its size and sha256

A checkpoint gets its name as a folder, so a file here needs no other name first, as `clearhead.files` gives it.
Tensors are written one after another, so that a save needs the memory of one tensor and not of a second copy of all.
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

# The names that the safetensors format gives to the types of numbers.
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


class Files:
    """What a save does to the disk. Tests put one that fails in its place."""

    def write(self, file: BinaryIO, chunk: bytes | memoryview) -> None:
        file.write(chunk)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)


@dataclass(frozen=True)
class Written:
    num_bytes: int
    sha256: str


def put(files: Files, path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
    """A new file, on the disk when this returns; its name is there once its folder is synced too."""
    sha256, num_bytes = hashlib.sha256(), 0
    with path.open("wb") as file:
        for chunk in chunks:
            files.write(file, chunk)
            sha256.update(chunk)
            num_bytes += len(chunk)
        file.flush()
        files.fsync(file.fileno())
    return Written(num_bytes, sha256.hexdigest())


def read_back(path: Path) -> Written:
    sha256, num_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            sha256.update(chunk)
            num_bytes += len(chunk)
    return Written(num_bytes, sha256.hexdigest())


def sync_folder(files: Files, folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        files.fsync(descriptor)
    finally:
        os.close(descriptor)


def tensor_chunks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """A safetensors file in pieces: the length of the header, the header, the numbers of each tensor."""
    # Readers view the numbers where they lie, so each tensor must begin at a multiple of its element size.
    # By name within a size, so that equal tensors make equal files.
    widest_first = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in widest_first:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text))
    yield text
    for _, tensor in widest_first:
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
