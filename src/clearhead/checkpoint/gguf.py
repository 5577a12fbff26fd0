"""Read GGUF files strictly: metadata, and tensors in PyTorch's order of dimensions.

    file = open_gguf("model.gguf"); file.metadata["general.architecture"], file.read("token_embd.weight").shape

`read` returns plain numbers as they are stored, and quantized tensors as float32, which takes at most 13 times their
bytes. Tensors may not overlap, so the file size bounds the memory of all of them together.
"""

from os import PathLike
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from clearhead.checkpoint.gguf_blocks import dequantize
from clearhead.checkpoint.gguf_header import GgufTensor, GgufValue, HeaderReader
from clearhead.errors import ClearheadError, unknown_name


class GgufFile:
    """The header of a GGUF file, and access to its tensors. The file itself does not stay open."""

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
        stored = np.fromfile(self.path, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        if len(stored) < tensor.num_bytes:
            raise ClearheadError(f"{self.path} has become shorter since its header was read")
        return stored.reshape(-1, tensor.block_type.bytes_per_block)

    def read(self, name: str) -> Tensor:
        """Return the values of a tensor: quantized blocks as float32, plain numbers in their own dtype."""
        blocks, tensor = self.read_blocks(name), self.tensors[name]
        return dequantize(blocks, tensor.block_type).reshape(tensor.shape)


def open_gguf(path: str | PathLike[str]) -> GgufFile:
    """Read and check the header of a file; its tensors are read later, by name."""
    path = Path(path)
    try:
        if not path.is_file() or path.stat().st_size == 0:
            raise ClearheadError(f"{path} is not a file, or is empty; give the path of a GGUF file")
        with path.open("rb") as file:
            return GgufFile(path, file)
    except OSError as error:
        raise ClearheadError(f"{path} cannot be opened: {error.strerror}") from error
