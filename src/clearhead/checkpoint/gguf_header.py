"""Parse the header of a GGUF file, versions 2 and 3, little-endian, without trusting it.

    header = HeaderReader(path, file); version, num_tensors, num_pairs = header.read_counts()

    magic "GGUF" | version u32 | num_tensors u64 | num_pairs u64
    num_pairs   * (key, type u32, value)
    num_tensors * (name, num_dims u32, dims u64 ..., block type u32, offset u64)
    padding to general.alignment, then the blocks; each tensor's offset counts from here

Every count, length, dimension and offset is compared with the bytes left in the file before it is used, so a damaged
file is rejected at once, in one sentence. Parsing allocates at most twice the file's size and 32 MiB.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import os
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clearhead.catalog import GGUF_START, not_gguf
from clearhead.checkpoint.gguf_blocks import BLOCK_TYPES, BlockType
from clearhead.errors import ClearheadError

_VALUE_TYPES = ["u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "string", "array", "<u8", "<i8", "<f8"]
"""By type id; the types of numbers are NumPy's."""

# The fewest bytes that an item takes in the file, to check a count before anything is allocated for it.
_MIN_PAIR_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_MIN_STRING_BYTES = 8
_MIN_ARRAY_BYTES = 4 + 8

# Python objects take more memory than their bytes in the file, so the numbers of pairs, tensors and arrays are limited.
MAX_COUNT = 2**15  # the 126 layers of Llama 3.1 405B are 1,134 tensors
_MAX_STRING_BYTES = 2**20
_MAX_TEXT_BYTES = 2**22  # keys, names and single strings together; Python may use 4 bytes for each
_MAX_ARRAY_DEPTH = _MAX_DIMS = 4
_ALIGNMENTS = [2**power for power in range(3, 17)]
_MAX_SHOWN_NAME = 80  # characters of a name in an error message


class StringArray:
    """An array of strings that are decoded on access; as a list they would take six times the memory."""

    def __init__(self, stored: bytes, starts: NDArray[np.int64]) -> None:
        """String i is `stored[starts[i] : starts[i + 1] - 8]`; the 8 bytes are the length of the next string."""
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
    """The place of a tensor in its file, and the format of its values."""

    path: Path
    name: str
    shape: tuple[int, ...]  # in PyTorch's order: the reverse of the dims in the file
    block_type: BlockType
    offset: int  # from the start of the file
    num_bytes: int


class HeaderReader:
    """Reads the header from front to back. Errors name the current `section` and the first byte of the current item."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.file_bytes = os.fstat(file.fileno()).st_size
        self.position = 0
        self.item_start = 0
        self.section = "opening"
        self.alignment = 32
        self.num_text_bytes = 0
        self.num_arrays = 0

    def error(self, problem: str) -> ClearheadError:
        """Return the error for the current item."""
        remedy = "" if ";" in problem else "; the file is damaged or incomplete: download it again"
        return ClearheadError(f"{self.path}, {self.section}, byte {self.item_start}: {problem}{remedy}")

    # --- the three parts of a header

    def read_counts(self) -> tuple[int, int, int]:
        """Read magic, version and counts; return (version, num_tensors, num_pairs)."""
        magic = self.take(4, "magic")
        if magic != GGUF_START:
            raise not_gguf(self.path, magic)
        version = self.integer(4, "version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
            found = f"big-endian version {swapped}" if swapped in (1, 2, 3) else f"version {version}"
            raise self.error(f"the file has GGUF {found}; only little-endian versions 2 and 3 can be read")
        num_tensors = self.integer(8, "number of tensors")
        num_pairs = self.integer(8, "number of metadata pairs")
        counts = f"{num_tensors} tensors and {num_pairs} metadata pairs"
        if max(num_tensors, num_pairs) > MAX_COUNT:
            raise self.error(f"the file has {counts}; at most {MAX_COUNT} of each are allowed")
        self.require(num_tensors * _MIN_TENSOR_BYTES + num_pairs * _MIN_PAIR_BYTES, counts)
        return version, num_tensors, num_pairs

    def read_metadata(self, count: int) -> dict[str, GgufValue]:
        """Read `count` pairs of key and value."""
        metadata: dict[str, GgufValue] = {}
        for index in range(count):
            key = self.name("metadata", index, metadata)
            value = metadata[key] = self.value()
            if key == "general.alignment":
                if not isinstance(value, int) or value not in _ALIGNMENTS:
                    raise self.error(f"{value!r:.40} is not a power of two from 8 to {_ALIGNMENTS[-1]}")
                self.alignment = value
        return metadata

    def read_tensors(self, count: int) -> dict[str, GgufTensor]:
        """Read the descriptions of `count` tensors; each must lie inside the file and overlap no other."""
        described: dict[str, GgufTensor] = {}
        for index in range(count):
            name = self.name("tensor", index, described)
            described[name] = self.tensor(name)
        blocks_start = -(-self.position // self.alignment) * self.alignment
        tensors = {name: replace(each, offset=blocks_start + each.offset) for name, each in described.items()}
        end, previous = blocks_start, "the header"
        for tensor in sorted(tensors.values(), key=lambda each: each.offset):
            self.section, self.item_start = f"tensor {tensor.name[:_MAX_SHOWN_NAME]!r}", tensor.offset
            if tensor.offset < end:
                raise self.error(f"its blocks overlap those of {previous}, which end at byte {end}")
            end, previous = tensor.offset + tensor.num_bytes, repr(tensor.name[:_MAX_SHOWN_NAME])
            if end > self.file_bytes:
                raise self.error(f"its {tensor.num_bytes} bytes go beyond the end of the file, byte {self.file_bytes}")
        return tensors

    # --- items

    def require(self, num_bytes: int, what: str) -> None:
        """Raise ClearheadError if fewer than `num_bytes` are left in the file."""
        num_left = self.file_bytes - self.position
        if num_bytes > num_left:
            raise self.error(f"{what}: at least {num_bytes} bytes are expected, but {num_left} are left in the file")

    def take(self, num_bytes: int, what: str) -> bytes:
        """Read bytes; `what` names them in errors."""
        self.item_start = self.position
        self.require(num_bytes, what)
        self.position += num_bytes
        return self.file.read(num_bytes)

    def integer(self, num_bytes: int, what: str) -> int:
        """Read an unsigned little-endian integer."""
        return int.from_bytes(self.take(num_bytes, what), "little")

    def string(self) -> str:
        """Read a string: its length in 8 bytes, then UTF-8."""
        length = self.integer(8, "length of a string")
        if length > _MAX_STRING_BYTES:
            raise self.error(f"a string has {length} bytes; at most {_MAX_STRING_BYTES} are allowed")
        try:
            return self.take(length, "string").decode()
        except UnicodeDecodeError as error:
            self.item_start += error.start
            raise self.error(f"the string is not UTF-8 ({error.reason})") from None

    def text(self) -> str:
        """Return a string that stays in memory as a Python string, and count its bytes."""
        text = self.string()
        self.num_text_bytes += self.position - self.item_start
        if self.num_text_bytes > _MAX_TEXT_BYTES:
            raise self.error(f"keys, names and single strings together may have at most {_MAX_TEXT_BYTES} bytes")
        return text

    def name(self, kind: str, index: int, earlier: Container[str]) -> str:
        """Return the name of a metadata pair or tensor, which must differ from `earlier` ones; start its section."""
        self.section = f"{kind} {index}"
        name = self.text()
        shown = repr(name[:_MAX_SHOWN_NAME])
        if not name:
            raise self.error("the name is empty")
        if name in earlier:
            raise self.error(f"{shown} occurs twice; names must differ")
        self.section = f"{kind} {shown}"
        return name

    def value_type(self) -> str:
        """Read the type of a metadata value: "string", "array" or a numpy dtype."""
        type_id = self.integer(4, "value type")
        if type_id >= len(_VALUE_TYPES):
            raise self.error(f"unknown value type {type_id}; types are 0 to {len(_VALUE_TYPES) - 1}")
        return _VALUE_TYPES[type_id]

    def value(self) -> GgufValue:
        """Read a metadata value with its type."""
        match self.value_type():
            case "string":
                return self.text()
            case "array":
                return self.array(depth=1)
            case number_type:
                return self.numbers(number_type, 1).item()

    def array(self, depth: int) -> GgufValue:
        """Read an array at this depth of nesting: element type, number of elements, elements."""
        self.num_arrays += 1
        if depth > _MAX_ARRAY_DEPTH or self.num_arrays > MAX_COUNT:
            raise self.error(f"at most {MAX_COUNT} arrays, nested at most {_MAX_ARRAY_DEPTH} deep, are allowed")
        value_type, count = self.value_type(), self.integer(8, "number of elements")
        match value_type:
            case "string":
                return self.strings(count)
            case "array":
                self.require(count * _MIN_ARRAY_BYTES, f"{count} arrays")
                return [self.array(depth + 1) for _ in range(count)]
            case number_type:
                return self.numbers(number_type, count)

    def numbers(self, number_type: str, count: int) -> NDArray[Any]:
        """Read numbers of one numpy dtype."""
        dtype = np.dtype(number_type)
        stored = np.frombuffer(self.take(count * dtype.itemsize, f"{count} values of {dtype}"), np.uint8)
        if number_type == "?" and stored.max(initial=0) > 1:
            raise self.error(f"a bool is stored as {stored.max()}; only 0 and 1 are allowed")
        return stored.view(dtype)

    def strings(self, count: int) -> StringArray:
        """Read strings without decoding them."""
        self.require(count * _MIN_STRING_BYTES, f"{count} strings")
        origin = self.position
        starts = np.empty(count + 1, dtype=np.int64)
        for index in range(count):
            starts[index] = self.position + 8 - origin
            self.string()
        starts[count] = self.position + 8 - origin
        self.file.seek(origin)
        return StringArray(self.file.read(self.position - origin), starts)

    def tensor(self, name: str) -> GgufTensor:
        """Return the description of a tensor; its offset counts from the first block."""
        num_dims = self.integer(4, "number of dimensions")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self.error(f"the tensor has {num_dims} dimensions; 1 to {_MAX_DIMS} are allowed")
        shape = tuple(self.integer(8, "dimension") for _ in range(num_dims))[::-1]
        type_id = self.integer(4, "block type")
        if type_id not in BLOCK_TYPES:
            known = ", ".join(f"{each.name} ({number})" for number, each in BLOCK_TYPES.items())
            raise self.error(f"block type {type_id} cannot be read; the supported types are {known}")
        block_type = BLOCK_TYPES[type_id]
        if 0 in shape or shape[-1] % block_type.values_per_block:
            size = f"{block_type.values_per_block}, the size of a {block_type.name} block"
            raise self.error(f"the shape is {shape}; no dimension may be 0, and the last must be a multiple of {size}")
        offset = self.integer(8, "offset")
        if offset % self.alignment:
            raise self.error(f"offset {offset} is not a multiple of the alignment, {self.alignment}")
        num_bytes = prod(shape) // block_type.values_per_block * block_type.bytes_per_block
        return GgufTensor(
            path=self.path, name=name, shape=shape, block_type=block_type, offset=offset, num_bytes=num_bytes
        )
