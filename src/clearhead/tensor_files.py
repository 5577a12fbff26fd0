"""Read and write safetensors files. Files are not trusted: the header is checked, and tensors get their own memory.

    file = SafetensorsFile(Path("model.safetensors")); file.metadata; weight = file.read("lm_head.weight")
    write_safetensors(Path("x.safetensors"), tensors); tensors, metadata = read_safetensors(Path("x.safetensors"))

The safetensors library maps files into memory instead: if a file is cut short later, using a tensor kills the process.
When it writes a file, it creates a temporary one of its own, which stays if the process is killed.
"""

import json
import math
import os
import re
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.errors import ClearheadError, require
from clearhead.files import MAX_JSON_TABLE_BYTES, atomic_write, check_regular, parse_json

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SURROGATE = re.compile("[\ud800-\udfff]")  # cannot be printed
_LENGTH_BYTES = 8  # the length of the header, before it
_MAX_DIMENSIONS = 16


class SafetensorsFile:
    """An open safetensors file. Every method raises ClearheadError if the file does not have what its header says."""

    def __init__(self, path: Path):
        check_regular(path)
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            weakref.finalize(self, os.close, self._descriptor)
            num_bytes = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise ClearheadError(f"{path} cannot be read: {error.strerror or error}") from None
        try:
            self._read_header(num_bytes)
        except ClearheadError as error:
            raise ClearheadError(
                f"{path} is not a complete safetensors file: {error}; write or download it again"
            ) from None

    def _read_header(self, num_bytes: int) -> None:
        require(num_bytes >= _LENGTH_BYTES, f"it has {num_bytes} bytes")
        length = int.from_bytes(self._read_bytes(0, _LENGTH_BYTES), "little")
        require(
            length <= MAX_JSON_TABLE_BYTES, f"its header has {length} bytes; at most {MAX_JSON_TABLE_BYTES} are allowed"
        )
        self._start = _LENGTH_BYTES + length
        require(self._start <= num_bytes, f"its header has {length} bytes, but the file has only {num_bytes}")
        try:
            text = self._read_bytes(_LENGTH_BYTES, length).tobytes().decode()
        except UnicodeDecodeError:
            raise ClearheadError("its header is not UTF-8 text") from None
        header = parse_json(text, "its header is ")
        require(isinstance(header, dict), "its header is not a JSON object")
        self.metadata = _check_metadata(header.pop("__metadata__", None))
        self._entries: dict[str, dict[str, Any]] = header
        _check_entries(header, num_bytes - self._start)

    @property
    def names(self) -> list[str]:
        """The names of all tensors, in the order of the header."""
        return list(self._entries)

    def dtype_name(self, name: str) -> str:
        """Return the dtype of a tensor as the file spells it."""
        return str(self._entries[name]["dtype"])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._entries[name]["shape"])

    def read(self, name: str) -> Tensor:
        """Return a tensor."""
        first, end = self._entries[name]["data_offsets"]
        return self._decode(name, self._read_bytes(self._start + first, end - first), self.shape(name))

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return the rows from `start` to `stop` of a tensor, without reading the others."""
        first, end = self._entries[name]["data_offsets"]
        num_rows, *other = self.shape(name)
        row_bytes = (end - first) // max(num_rows, 1)
        stored = self._read_bytes(self._start + first + start * row_bytes, (stop - start) * row_bytes)
        return self._decode(name, stored, (stop - start, *other))

    def _decode(self, name: str, stored: NDArray[np.uint8], shape: tuple[int, ...]) -> Tensor:
        dtype = _DTYPES.get(self.dtype_name(name))
        if dtype is None:
            raise ClearheadError(f"the tensor {name} has the dtype {self.dtype_name(name)}, which is not supported")
        try:
            if not stored.size:  # torch cannot view no bytes as another dtype
                return torch.empty(shape, dtype=dtype)
            # A bool of torch has the byte 0 or 1; other bytes would give nonsense.
            values = torch.from_numpy(stored != 0) if dtype == torch.bool else torch.from_numpy(stored).view(dtype)
            return values.reshape(shape)
        except RuntimeError:  # sizes whose product overflows, beside a size of 0
            raise ClearheadError(f"the tensor {name} has an impossible shape: {shape}") from None

    def _read_bytes(self, start: int, num_bytes: int) -> NDArray[np.uint8]:
        """Return a part of the file; raise ClearheadError if it is not there any more."""
        stored = np.empty(num_bytes, dtype=np.uint8)
        try:
            with open(self._descriptor, "rb", buffering=0, closefd=False) as file:
                file.seek(start)
                num_read = 0
                while num_read < num_bytes:  # one call reads at most 2 GB
                    count = file.readinto(stored[num_read:].data)
                    require(bool(count), "the file has become shorter since its header was read")
                    num_read += count
        except OSError as error:
            raise ClearheadError(f"{self.path} cannot be read: {error.strerror or error}") from None
        return stored


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return all tensors of a file and its metadata."""
    file = SafetensorsFile(path)
    return {name: file.read(name) for name in file.names}, file.metadata


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically."""
    with atomic_write(path) as partial, partial.open("wb") as file:
        for chunk in safetensors_chunks(tensors, metadata or {}):
            file.write(chunk)


def safetensors_chunks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file in pieces: the length of the header, the header, and the data of each tensor.

    Only one tensor at a time is copied to the CPU.
    """
    # Readers map the data into memory, so each tensor must begin at a multiple of its element size: the widest come
    # first. Tensors of equal element size are sorted by name, so that equal tensors give equal files.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    yield len(text).to_bytes(_LENGTH_BYTES, "little")
    yield text
    for _, tensor in ordered:
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _check_metadata(metadata: Any) -> dict[str, str]:
    """Return the metadata of a header, which is an object of texts."""
    metadata = {} if metadata is None else metadata
    is_valid = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    require(is_valid, "its metadata must be an object of texts")
    return metadata


def _check_entries(entries: dict[str, Any], num_bytes: int) -> None:
    """Raise ClearheadError unless the tensors fill the data of the file without gaps or overlaps."""
    for name, entry in entries.items():
        require(not _SURROGATE.search(name), "the name of a tensor has an unpaired surrogate")
        is_entry = isinstance(entry, dict) and isinstance(entry.get("dtype"), str)
        is_entry = is_entry and _are_sizes(entry.get("shape")) and _are_sizes(entry.get("data_offsets"))
        require(
            is_entry and len(entry["data_offsets"]) == 2 and len(entry["shape"]) <= _MAX_DIMENSIONS,
            f"the tensor {name[:100]!r} needs a dtype, a shape and two data_offsets",
        )
        first, end = entry["data_offsets"]
        dtype = _DTYPES.get(entry["dtype"])
        fits = dtype is None or end - first == math.prod(entry["shape"]) * dtype.itemsize
        require(first <= end <= num_bytes and fits, f"the tensor {name[:100]!r} does not fit its data_offsets")
    position = 0
    for first, end in sorted(entry["data_offsets"] for entry in entries.values()):
        require(first == position, f"the bytes from {position} to {first} belong to no tensor or to two")
        position = end
    require(position == num_bytes, f"its tensors have {position} bytes, but the file has {num_bytes}")


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)
