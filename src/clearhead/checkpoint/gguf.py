"""A strict reader of GGUF files, versions 2 and 3, little-endian: metadata, and tensors as PyTorch sees them.

    file = open_gguf("model.gguf")
    print(file.metadata["general.architecture"], file.read("token_embd.weight").shape)

    magic "GGUF" | version u32 | num_tensors u64 | num_pairs u64
    num_pairs   * (key, type u32, value)
    num_tensors * (name, num_dims u32, dims u64 ..., block type u32, offset u64)
    padding to general.alignment, then the blocks; each tensor's offset counts from here

Nothing in the file is trusted: every count, length, dimension and offset is checked against the bytes left
before it is used, so that a bad file is refused at once, in one sentence. Opening allocates at most twice the
file's size and 32 MiB. `read` gives plain numbers in the bytes they have in the file, and float32 of a quantised
tensor, at most 13 times its bytes; tensors may not overlap, so all of them together are bounded by the file.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import os
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from clearhead.checkpoint.gguf_blocks import BLOCK_TYPES, BlockType, dequantize
from clearhead.errors import ClearheadError, unknown_name

VALUE_TYPES = ["u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "string", "array", "<u8", "<i8", "<f8"]
"""By type id; numbers as numpy spells their type."""

# The least bytes a thing takes in the file: what a count is multiplied with before it is believed.
MIN_PAIR_BYTES = 8 + 1 + 4 + 1
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
MIN_STRING_BYTES = 8
MIN_ARRAY_BYTES = 4 + 8

# Python objects outweigh their bytes in the file, so pairs, tensors and arrays may each be this many.
MAX_COUNT = 2**15  # the 126 layers of Llama 3.1 405B are 1,134 tensors
MAX_STRING_BYTES = 2**20
MAX_TEXT_BYTES = 2**22  # of keys, names and single strings together: Python may spend 4 bytes on each
MAX_ARRAY_DEPTH = MAX_DIMS = 4
ALIGNMENTS = [2**power for power in range(3, 17)]


class StringArray:
    """An array of strings as the file holds them, decoded when asked for: a list would weigh six times that."""

    def __init__(self, stored: bytes, starts: NDArray[np.int64]) -> None:
        """String i is `stored[starts[i] : starts[i + 1] - 8]`; the 8 bytes are the length of the next."""
        self._stored = stored
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> str:
        index = range(len(self))[index]
        return self._stored[self._starts[index] : self._starts[index + 1] - 8].decode()

    def __iter__(self) -> Iterator[str]:
        for start, next_start in pairwise(self._starts.tolist()):
            yield self._stored[start : next_start - 8].decode()


GgufValue: TypeAlias = "int | float | str | NDArray[Any] | StringArray | list[GgufValue]"


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """Where a tensor lies in its file, and how its values are stored."""

    name: str
    shape: tuple[int, ...]  # PyTorch order: the file's dims reversed
    block_type: BlockType
    offset: int  # from the start of the file
    num_bytes: int


class GgufFile:
    """What the header says, and the tensors when asked for; the file itself does not stay open."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        header = _Header(path, file)
        self.path = path
        self.version, num_tensors, num_pairs = header.opening()
        self.metadata: dict[str, GgufValue] = header.pairs(num_pairs)
        self.tensors: dict[str, GgufTensor] = header.tensors(num_tensors)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The blocks as stored, (num_blocks, bytes_per_block)."""
        if name not in self.tensors:
            raise unknown_name("tensor", name, self.tensors)
        tensor = self.tensors[name]
        stored = np.fromfile(self.path, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        if len(stored) < tensor.num_bytes:
            raise ClearheadError(f"{self.path} has become shorter since its header was read")
        return stored.reshape(-1, tensor.block_type.bytes_per_block)

    def read(self, name: str) -> Tensor:
        """The values: quantised blocks as float32, plain numbers in their own dtype."""
        blocks, tensor = self.raw(name), self.tensors[name]
        return dequantize(blocks, tensor.block_type).reshape(tensor.shape)


def open_gguf(path: str | PathLike[str]) -> GgufFile:
    """Read the header; the values of its tensors are read when asked for."""
    path = Path(path)
    try:
        if not path.is_file() or path.stat().st_size == 0:
            raise ClearheadError(f"{path} is not a file, or is empty; give the path of a GGUF file")
        with path.open("rb") as file:
            return GgufFile(path, file)
    except OSError as error:
        raise ClearheadError(f"{path} cannot be opened: {error.strerror}") from error


class _Header:
    """Reads forward through all that comes before the blocks; an error names `place` and the byte of `item`."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.file_bytes = os.fstat(file.fileno()).st_size
        self.position = 0
        self.item = 0
        self.place = "opening"
        self.alignment = 32
        self.num_text_bytes = 0
        self.num_arrays = 0

    def error(self, complaint: str) -> ClearheadError:
        return ClearheadError(f"{self.path}, {self.place}, byte {self.item}: {complaint}")

    def require(self, num_bytes: int, what: str) -> None:
        num_left = self.file_bytes - self.position
        if num_bytes > num_left:
            raise self.error(f"{what}: at least {num_bytes} bytes expected, {num_left} left in the file")

    def take(self, num_bytes: int, what: str) -> bytes:
        self.item = self.position
        self.require(num_bytes, what)
        self.position += num_bytes
        return self.file.read(num_bytes)

    def integer(self, num_bytes: int, what: str) -> int:
        return int.from_bytes(self.take(num_bytes, what), "little")

    def string(self) -> str:
        length = self.integer(8, "length of a string")
        if length > MAX_STRING_BYTES:
            raise self.error(f"a string of {length} bytes; at most {MAX_STRING_BYTES} are allowed")
        try:
            return self.take(length, "string").decode()
        except UnicodeDecodeError as error:
            self.item += error.start
            raise self.error(f"the string is not UTF-8 ({error.reason})") from None

    def text(self) -> str:
        """A string kept as a Python string, and therefore counted."""
        text = self.string()
        self.num_text_bytes += self.position - self.item
        if self.num_text_bytes > MAX_TEXT_BYTES:
            raise self.error(f"keys, names and single strings are over {MAX_TEXT_BYTES} bytes together")
        return text

    def name(self, kind: str, index: int, taken: Container[str]) -> str:
        self.place = f"{kind} {index}"
        name = self.text()
        if not name:
            raise self.error("the name is empty")
        if name in taken:
            raise self.error(f"{name[:80]!r} occurs twice; names must differ")
        self.place = f"{kind} {name[:80]!r}"
        return name

    def opening(self) -> tuple[int, int, int]:
        """Magic, version and counts -> (version, num_tensors, num_pairs)."""
        magic = self.take(4, "magic")
        if magic != b"GGUF":
            raise self.error(f"found {magic!r}; a GGUF file begins with b'GGUF'")
        version = self.integer(4, "version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
            found = f"big-endian version {swapped}" if swapped in (1, 2, 3) else f"version {version}"
            raise self.error(f"GGUF {found}; only little-endian versions 2 and 3 can be read")
        num_tensors = self.integer(8, "number of tensors")
        num_pairs = self.integer(8, "number of metadata pairs")
        counted = f"{num_tensors} tensors and {num_pairs} metadata pairs"
        if max(num_tensors, num_pairs) > MAX_COUNT:
            raise self.error(f"{counted}; at most {MAX_COUNT} of each are allowed")
        self.require(num_tensors * MIN_TENSOR_BYTES + num_pairs * MIN_PAIR_BYTES, counted)
        return version, num_tensors, num_pairs

    def pairs(self, count: int) -> dict[str, GgufValue]:
        metadata: dict[str, GgufValue] = {}
        for index in range(count):
            key = self.name("metadata", index, metadata)
            value = metadata[key] = self.value()
            if key == "general.alignment":
                if not isinstance(value, int) or value not in ALIGNMENTS:
                    raise self.error(f"{value!r:.40} is not a power of two from 8 to {ALIGNMENTS[-1]}")
                self.alignment = value
        return metadata

    def value_type(self) -> str:
        type_id = self.integer(4, "value type")
        if type_id >= len(VALUE_TYPES):
            raise self.error(f"unknown value type {type_id}; types are 0 to {len(VALUE_TYPES) - 1}")
        return VALUE_TYPES[type_id]

    def value(self) -> GgufValue:
        match self.value_type():
            case "string":
                return self.text()
            case "array":
                return self.array(depth=1)
            case number_type:
                return self.numbers(number_type, 1).item()

    def array(self, depth: int) -> GgufValue:
        self.num_arrays += 1
        if depth > MAX_ARRAY_DEPTH or self.num_arrays > MAX_COUNT:
            raise self.error(f"at most {MAX_COUNT} arrays, nested at most {MAX_ARRAY_DEPTH} deep, are allowed")
        value_type, count = self.value_type(), self.integer(8, "number of elements")
        match value_type:
            case "string":
                return self.strings(count)
            case "array":
                self.require(count * MIN_ARRAY_BYTES, f"{count} arrays")
                return [self.array(depth + 1) for _ in range(count)]
            case number_type:
                return self.numbers(number_type, count)

    def numbers(self, number_type: str, count: int) -> NDArray[Any]:
        dtype = np.dtype(number_type)
        stored = np.frombuffer(self.take(count * dtype.itemsize, f"{count} values of {dtype}"), np.uint8)
        if number_type == "?" and stored.max(initial=0) > 1:
            raise self.error(f"a bool stored as {stored.max()}; only 0 and 1 are allowed")
        return stored.view(dtype)

    def strings(self, count: int) -> StringArray:
        self.require(count * MIN_STRING_BYTES, f"{count} strings")
        origin = self.position
        starts = np.empty(count + 1, dtype=np.int64)
        for index in range(count):
            starts[index] = self.position + 8 - origin
            self.string()
        starts[count] = self.position + 8 - origin
        self.file.seek(origin)
        return StringArray(self.file.read(self.position - origin), starts)

    def tensors(self, count: int) -> dict[str, GgufTensor]:
        """All tensors, their offsets now from the start of the file: each inside it and apart from the others."""
        described: dict[str, GgufTensor] = {}
        for index in range(count):
            name = self.name("tensor", index, described)
            described[name] = self.tensor(name)
        origin = -(-self.position // self.alignment) * self.alignment
        tensors = {name: replace(each, offset=origin + each.offset) for name, each in described.items()}
        end, before = origin, "the header"
        for tensor in sorted(tensors.values(), key=lambda each: each.offset):
            self.place, self.item = f"tensor {tensor.name[:80]!r}", tensor.offset
            if tensor.offset < end:
                raise self.error(f"its blocks overlap those of {before}, which end at byte {end}")
            end, before = tensor.offset + tensor.num_bytes, repr(tensor.name[:80])
            if end > self.file_bytes:
                raise self.error(f"its {tensor.num_bytes} bytes go beyond the end of the file, {self.file_bytes}")
        return tensors

    def tensor(self, name: str) -> GgufTensor:
        num_dims = self.integer(4, "number of dimensions")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.error(f"{num_dims} dimensions; 1 to {MAX_DIMS} are allowed")
        shape = tuple(self.integer(8, "dimension") for _ in range(num_dims))[::-1]
        type_id = self.integer(4, "block type")
        if type_id not in BLOCK_TYPES:
            known = ", ".join(f"{each.name} ({number})" for number, each in BLOCK_TYPES.items())
            raise self.error(f"block type {type_id} cannot be read; known are {known}")
        block_type = BLOCK_TYPES[type_id]
        if 0 in shape or shape[-1] % block_type.values_per_block:
            whole = f"blocks of {block_type.values_per_block} values ({block_type.name})"
            raise self.error(f"shape {shape}; no dimension may be 0 and the last must be whole {whole}")
        offset = self.integer(8, "offset")
        if offset % self.alignment:
            raise self.error(f"offset {offset} is not a multiple of the alignment, {self.alignment}")
        num_bytes = prod(shape) // block_type.values_per_block * block_type.bytes_per_block
        return GgufTensor(name=name, shape=shape, block_type=block_type, offset=offset, num_bytes=num_bytes)
