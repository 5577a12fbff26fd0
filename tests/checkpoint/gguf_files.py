"""Build small GGUF files byte by byte, valid or deliberately invalid.

gguf([pair("a", 4, u32(7))], [tensor("w", [32], 0, offset=0)], bytes(128))
"""

import struct
from collections.abc import Sequence

STRING, ARRAY = 8, 9


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes) -> bytes:
    stored = text.encode() if isinstance(text, str) else text
    return u64(len(stored)) + stored


def array(element_type: int, elements: Sequence[bytes], count: int | None = None) -> bytes:
    return u32(element_type) + u64(len(elements) if count is None else count) + b"".join(elements)


def pair(key: str | bytes, value_type: int, value: bytes) -> bytes:
    return string(key) + u32(value_type) + value


def tensor(name: str | bytes, dims: Sequence[int], block_type: int, offset: int, num_dims: int | None = None) -> bytes:
    shape = u32(len(dims) if num_dims is None else num_dims) + b"".join(u64(dim) for dim in dims)
    return string(name) + shape + u32(block_type) + u64(offset)


def gguf(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    blocks: bytes = b"",
    *,
    version: bytes = u32(3),
    num_pairs: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = u64(len(tensors) if num_tensors is None else num_tensors)
    counts += u64(len(pairs) if num_pairs is None else num_pairs)
    header = b"GGUF" + version + counts + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + blocks
