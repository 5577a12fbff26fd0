"""Read CTranslate2's `model.bin`, version 6: named variables, then aliases of some of them.

    open_ctranslate2("opus-mt-zh-en").tensors["encoder/layer_0/ffn/linear_0/weight"]   # (F, D)

    file     = version | spec | revision | count | variable ... | count | (alias | name) ...
    variable = name | rank | dims | type | num_bytes | data

Numbers are little-endian. A string is a 16-bit length and that many bytes, of which the last is zero. The layout is in
github.com/OpenNMT/CTranslate2, `model_spec.py` (_serialize). An integer weight `x` has a variable `x_scale` with one
number for each row, or a single one, and represents weight / scale.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from os import PathLike
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from clearhead.checkpoint.tensors import LazyTensors
from clearhead.errors import ClearheadError, quote
from clearhead.files import check_regular, read_json_object

_VERSION = 6
_MAX_RANK = 8  # models use up to 3; NumPy supports up to 32
TYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)  # by type number
_QUANTIZED_TYPES = (torch.int8, torch.int16)


@dataclass(frozen=True, kw_only=True)
class CTranslate2Checkpoint:
    """The content of a CTranslate2 folder, except its vocabulary."""

    spec: str  # the architecture, for instance "TransformerSpec"
    revision: int  # of the spec
    config: dict[str, object]  # config.json beside the file; empty if there is none
    settings: dict[str, int | float]  # the variables of rank 0, for instance "decoder/num_heads"
    tensors: Mapping[str, Tensor]  # all others, including aliases; scaled weights as float32, without their scales
    aliases: dict[str, str]  # alias -> the variable that it stands for


@dataclass(frozen=True, kw_only=True)
class _Variable:
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int
    scale: "_Variable | None" = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the values in the file."""
        return prod(self.shape) * self.dtype.itemsize


def open_ctranslate2(path: str | PathLike[str]) -> CTranslate2Checkpoint:
    """Check a `model.bin`, or the one in a folder, from beginning to end; its tensors are read later, one at a time."""
    path = Path(path)
    path = path / "model.bin" if path.is_dir() else path
    check_regular(path)
    try:
        with path.open("rb") as file:
            reader = _Reader(path, file)
            spec, revision = _parse_spec(reader)
            variables = _parse_variables(reader)
            aliases = _parse_aliases(reader, variables)
        config = read_json_object(path.with_name("config.json"))
    except OSError as error:
        raise ClearheadError(f"cannot read {error.filename!r}: {error.strerror}") from error
    scaled = _attach_scales(reader, variables)
    aliases = {alias: name for alias, name in aliases.items() if name in scaled}
    named = scaled | {alias: scaled[name] for alias, name in aliases.items()}
    return CTranslate2Checkpoint(
        spec=spec,
        revision=revision,
        config=config,
        settings={name: _read(path, variable).item() for name, variable in named.items() if not variable.shape},
        tensors=LazyTensors(
            (name for name, variable in named.items() if variable.shape),
            lambda name: _read_scaled(path, name, named[name]),
        ),
        aliases=aliases,
    )


class _Reader:
    """Reads a file from front to back; compares every length with the bytes left before it is used."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.left_bytes = path.stat().st_size

    def error(self, problem: str) -> ClearheadError:
        """Return the error for a file with this problem."""
        return ClearheadError(f"{str(self.path)!r} is not a valid CTranslate2 model: {problem}")

    def numbers(self, layout: str) -> tuple[int, ...]:
        """Read numbers in a layout of the struct module."""
        packed = struct.Struct(f"<{layout}")
        self._consume(packed.size)
        return packed.unpack(self.file.read(packed.size))

    def string(self) -> str:
        """Read a string: its length in 2 bytes, then ASCII with a zero byte at the end."""
        (num_bytes,) = self.numbers("H")
        self._consume(num_bytes)
        text = self.file.read(num_bytes)
        if not text.endswith(b"\0") or not text.isascii():
            raise self.error(f"{text[:40]!r} is not a valid name; a name is ASCII text that ends with a zero byte")
        return text[:-1].decode("ascii")

    def skip(self, num_bytes: int) -> int:
        """Skip `num_bytes`; return the offset of the first."""
        self._consume(num_bytes)
        return self.file.seek(num_bytes, 1) - num_bytes

    def _consume(self, num_bytes: int) -> None:
        if num_bytes > self.left_bytes:
            raise self.error(f"{num_bytes} bytes are expected, but {self.left_bytes} are left in the file")
        self.left_bytes -= num_bytes


def _parse_spec(reader: _Reader) -> tuple[str, int]:
    (version,) = reader.numbers("I")
    if version != _VERSION:
        raise reader.error(f"it has version {version}; only version {_VERSION} can be read, so convert the model again")
    spec = reader.string()
    (revision,) = reader.numbers("I")
    return spec, revision


def _parse_variables(reader: _Reader) -> dict[str, _Variable]:
    variables: dict[str, _Variable] = {}
    (num_variables,) = reader.numbers("I")
    for _ in range(num_variables):
        name = reader.string()
        (rank,) = reader.numbers("B")
        if rank > _MAX_RANK:
            raise reader.error(f"{quote(name)} has {rank} dimensions; at most {_MAX_RANK} are allowed")
        shape = reader.numbers(f"{rank}I")
        type_number, num_bytes = reader.numbers("BI")
        if type_number >= len(TYPES):
            raise reader.error(f"{quote(name)} has type {type_number}; only types 0 to {len(TYPES) - 1} are supported")
        variable = _Variable(shape=shape, dtype=TYPES[type_number], offset_bytes=reader.skip(num_bytes))
        if 0 in shape or variable.num_bytes != num_bytes:
            raise reader.error(f"{quote(name)} of shape {shape} cannot have {num_bytes} bytes")
        if name in variables:
            raise reader.error(f"{quote(name)} occurs twice")
        variables[name] = variable
    return variables


def _parse_aliases(reader: _Reader, variables: dict[str, _Variable]) -> dict[str, str]:
    aliases: dict[str, str] = {}
    (num_aliases,) = reader.numbers("I")
    for _ in range(num_aliases):
        alias, name = reader.string(), reader.string()
        if name not in variables:
            raise reader.error(f"the alias {quote(alias)} refers to {quote(name)}, which is missing")
        if alias in variables or alias in aliases:
            raise reader.error(f"{quote(alias)} occurs twice")
        aliases[alias] = name
    if reader.left_bytes:
        raise reader.error(f"{reader.left_bytes} bytes follow its end")
    return aliases


def _attach_scales(reader: _Reader, variables: dict[str, _Variable]) -> dict[str, _Variable]:
    """Return the variables with each scale attached to the variable that it belongs to, and removed as an entry."""
    scaled = dict(variables)
    for name, variable in variables.items():
        scale = variables.get(f"{name}_scale")
        if scale is None or not variable.shape or variable.dtype not in _QUANTIZED_TYPES:
            continue
        if scale.shape not in ((), (1,), variable.shape[:1]) or not scale.dtype.is_floating_point:
            raise reader.error(f"{quote(name)} of shape {variable.shape} cannot have a scale of shape {scale.shape}")
        scaled[name] = replace(variable, scale=scale)
        del scaled[f"{name}_scale"]
    return scaled


def _read_scaled(path: Path, name: str, variable: _Variable) -> Tensor:
    tensor = _read(path, variable)
    if variable.scale is None:
        return tensor
    scale = _read(path, variable.scale).float()
    if not (scale.isfinite() & (scale > 0)).all():
        raise ClearheadError(
            f"{str(path)!r}: the scale of {quote(name)} holds numbers that are not positive and finite"
        )
    return tensor.float() / scale.reshape(-1, *(1,) * (tensor.dim() - 1))


def _read(path: Path, variable: _Variable) -> Tensor:
    stored = np.fromfile(path, dtype=np.uint8, count=variable.num_bytes, offset=variable.offset_bytes)
    if len(stored) != variable.num_bytes:
        raise ClearheadError(f"{str(path)!r} became shorter while it was being read")
    return torch.from_numpy(stored).view(variable.dtype).reshape(variable.shape)
