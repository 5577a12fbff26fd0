"""Read GGUF files strictly: metadata, and tensors in PyTorch's order of dimensions.

    file = open_gguf("model.gguf"); file.metadata["general.architecture"], file.read("token_embd.weight").shape

`read` returns plain numbers as they are stored, and quantized tensors as float32, which takes at most 13 times their
bytes. Tensors may not overlap, so the file size bounds the memory of all of them together.

A large model may be split into files that end in -00001-of-00003.gguf. Open any of them: the first one holds the
metadata, and the tensors of all are read from where they are.
"""

import re
from os import PathLike
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from clearhead.checkpoint.gguf_blocks import dequantize
from clearhead.checkpoint.gguf_header import GgufTensor, GgufValue, HeaderReader
from clearhead.errors import ClearheadError, unknown_name

_PART_NAME = re.compile(r"(?P<start>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL | re.IGNORECASE)
_MAX_PARTS = 1000


class GgufFile:
    """The header of a GGUF file, and access to its tensors. The file itself does not stay open.

    `add_parts` adds the tensors of the other files of a split model.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        header = HeaderReader(path, file)
        self.path = path
        self.version, num_tensors, num_pairs = header.read_counts()
        self.metadata: dict[str, GgufValue] = header.read_metadata(num_pairs)
        self.tensors: dict[str, GgufTensor] = header.read_tensors(num_tensors)

    def read_blocks(self, name: str) -> NDArray[np.uint8]:
        """Return the stored bytes of a tensor as (num_blocks, bytes_per_block)."""
        if name not in self.tensors:
            raise unknown_name("tensor", name, self.tensors)
        tensor = self.tensors[name]
        stored = np.fromfile(tensor.path, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        if len(stored) < tensor.num_bytes:
            raise ClearheadError(f"{tensor.path} has become shorter since its header was read")
        return stored.reshape(-1, tensor.block_type.bytes_per_block)

    def read(self, name: str) -> Tensor:
        """Return the values of a tensor: quantized blocks as float32, plain numbers in their own dtype."""
        blocks, tensor = self.read_blocks(name), self.tensors[name]
        return dequantize(blocks, tensor.block_type).reshape(tensor.shape)

    def split_number(self, key: str, default: int) -> int:
        """Return an integer that describes the parts of a split model."""
        value = self.metadata.get(f"split.{key}", default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ClearheadError(f"{self.path}: split.{key} is {value!r:.40}; it must be a whole number")
        return value

    def add_parts(self) -> None:
        """Add the tensors of the other parts of a split model, of which this is the first."""
        count, match = self.split_number("count", 1), _PART_NAME.fullmatch(self.path.name)
        if count < 2:
            return
        if match is None or int(match["number"]) != 1 or int(match["count"]) != count or count > _MAX_PARTS:
            raise ClearheadError(
                f"{self.path} is one of {count} parts of a model; the parts must be named as they were written, "
                f"NAME-00001-of-{count:05d}.gguf and so on (at most {_MAX_PARTS}), and lie in one folder"
            )
        for number in range(2, count + 1):
            path = self.path.with_name(f"{match['start']}-{number:05d}-of-{match['count']}{self.path.suffix}")
            if not path.is_file():
                raise ClearheadError(f"{path} is missing; the model is split into {count} files, which belong together")
            part = _open_file(path)
            if part.split_number("no", 0) != number - 1 or part.split_number("count", 1) != count:
                raise ClearheadError(f"{path} does not belong to {self.path}: its split.no or split.count differs")
            for name, tensor in part.tensors.items():
                if self.tensors.setdefault(name, tensor) is not tensor:
                    raise ClearheadError(f"{path}: the tensor {name!r:.80} is also in another part of the model")
        expected = self.split_number("tensors.count", len(self.tensors))
        if expected != len(self.tensors):
            raise ClearheadError(
                f"{self.path}: its parts hold {len(self.tensors)} tensors, but there must be {expected}"
            )


def open_gguf(path: str | PathLike[str]) -> GgufFile:
    """Read and check the header of a file, or of all files of a split model; tensors are read later, by name."""
    path = Path(path)
    match = _PART_NAME.fullmatch(path.name)
    if match is not None and int(match["number"]) > 1:
        first = path.with_name(f"{match['start']}-00001-of-{match['count']}{path.suffix}")
        path = first if first.is_file() else path
    file = _open_file(path)
    if file.split_number("no", 0) > 0:
        raise ClearheadError(f"{path} is a later part of a split model; its first part, 00001, is missing")
    file.add_parts()
    return file


def _open_file(path: Path) -> GgufFile:
    """Read and check the header of one file."""
    try:
        if not path.is_file() or path.stat().st_size == 0:
            raise ClearheadError(f"{path} is not a file, or is empty; give the path of a GGUF file")
        with path.open("rb") as file:
            return GgufFile(path, file)
    except OSError as error:
        raise ClearheadError(f"{path} cannot be opened: {error.strerror}") from error
