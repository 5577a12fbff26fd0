"""Write GGUF files, version 3: metadata, descriptions of tensors, blocks.

    write_gguf(path, {"general.architecture": "llama"}, [TensorPlan("output.weight", (32, 64), "Q8_0", make_blocks)])

The layout is drawn in gguf_header.py. Blocks are made one tensor at a time, so that the memory of one tensor is enough,
and the file appears under its name when it is complete.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from clearhead.checkpoint.gguf_blocks import BLOCK_TYPES
from clearhead.errors import ClearheadError
from clearhead.files import atomic_write

_ALIGNMENT = 32
_TYPE_IDS = {block_type.name: type_id for type_id, block_type in BLOCK_TYPES.items()}
_UINT8, _UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64 = 0, 4, 5, 6, 7, 8, 9, 10


@dataclass(frozen=True)
class TensorPlan:
    """A tensor to write: `make_blocks` returns its bytes as uint8, and is called once."""

    name: str
    shape: tuple[int, ...]
    block_type: str
    make_blocks: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Size of its blocks."""
        block_type = BLOCK_TYPES[_TYPE_IDS[self.block_type]]
        num_values = 1
        for size in self.shape:
            num_values *= size
        return num_values // block_type.values_per_block * block_type.bytes_per_block


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[TensorPlan],
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Write a file atomically; `progress(tensor_name, num_done, num_total)` is called after each tensor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial, partial.open("wb") as file:
        file.write(_header(metadata, tensors))
        _pad(file)
        for num_done, tensor in enumerate(tensors, 1):
            blocks = tensor.make_blocks()
            assert blocks.numel() == tensor.num_bytes, f"{tensor.name} has another size than planned"
            file.write(blocks.contiguous().view(-1).numpy().data)
            _pad(file)
            if progress is not None:
                progress(tensor.name, num_done, len(tensors))


def _header(metadata: Mapping[str, Any], tensors: Sequence[TensorPlan]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), _typed_value(key, value)]
    offset = 0
    for tensor in tensors:
        shape = tensor.shape[::-1]
        parts += [_string(tensor.name), struct.pack(f"<I{len(shape)}Q", len(shape), *shape)]
        parts.append(struct.pack("<IQ", _TYPE_IDS[tensor.block_type], offset))
        offset += -(-tensor.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return b"".join(parts)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % _ALIGNMENT))


def _string(text: str) -> bytes:
    stored = text.encode()
    return struct.pack("<Q", len(stored)) + stored


def _typed_value(key: str, value: Any) -> bytes:
    """Return the number of a value's type, and the value."""
    if isinstance(value, bytes):
        return struct.pack("<IIQ", _ARRAY, _UINT8, len(value)) + value
    if isinstance(value, list):
        kinds = {_type_of(key, each) for each in value} or {_STRING}
        kind = _INT32 if kinds == {_UINT32} else min(kinds)
        if len(kinds) > 1:
            raise ClearheadError(f"the values of {key} have several types; a GGUF file can hold only one")
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + b"".join(_encode(kind, each) for each in value)
    kind = _type_of(key, value)
    return struct.pack("<I", kind) + _encode(kind, value)


def _type_of(key: str, value: Any) -> int:
    match value:
        case bool():
            return _BOOL
        case int() if 0 <= value < 2**31:
            return _UINT32
        case int() if 0 <= value < 2**63:
            return _UINT64
        case float():
            return _FLOAT32
        case str():
            return _STRING
    raise ClearheadError(f"{key} is {value!r:.40}, which the metadata of a GGUF file cannot hold")


def _encode(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return _string(value)
    return struct.pack({_UINT32: "<I", _INT32: "<i", _UINT64: "<Q", _FLOAT32: "<f", _BOOL: "<?"}[kind], value)
