"""Reads CTranslate2's `model.bin`, version 6: a list of named variables, then names that share one of them.

    open_ctranslate2("opus-mt-zh-en").tensors["encoder/layer_0/ffn/linear_0/weight"]   # (F, D)

    file     = version | spec | revision | count | variable ... | count | (alias | name) ...
    variable = name | rank | dims | type | num_bytes | data

Numbers are little-endian; a string is a 16-bit length and that many bytes, the last of them zero. The layout
is in github.com/OpenNMT/CTranslate2, `model_spec.py` (_serialize). An integer weight has a sister `_scale`,
one number for each row or for all, and stands for weight / scale.
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
from clearhead.errors import ClearheadError
from clearhead.files import read_object

VERSION = 6
MAX_RANK = 8  # models use up to 3; numpy holds up to 32
TYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)  # by type number
QUANTIZED_TYPES = (torch.int8, torch.int16)


@dataclass(frozen=True, kw_only=True)
class CTranslate2Checkpoint:
    spec: str  # the architecture, for instance "TransformerSpec"
    revision: int  # of the spec
    config: dict[str, object]  # config.json beside the file; empty where there is none
    settings: dict[str, int | float]  # the variables of rank 0, for instance "decoder/num_heads"
    tensors: Mapping[str, Tensor]  # all others, aliases among them; scaled weights as float32, without scales
    aliases: dict[str, str]  # alias -> the variable it shares


@dataclass(frozen=True, kw_only=True)
class _Variable:
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int
    scale: "_Variable | None" = None

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def open_ctranslate2(path: str | PathLike[str]) -> CTranslate2Checkpoint:
    """Check a `model.bin`, or the one in a folder, from end to end; its tensors are read later, one at a time."""
    path = Path(path)
    path = path / "model.bin" if path.is_dir() else path
    try:
        with path.open("rb") as file:
            cursor = _Cursor(path, file)
            spec, revision = _parse_opening(cursor)
            variables = _parse_variables(cursor)
            aliases = _parse_aliases(cursor, variables)
        config = read_object(path.with_name("config.json"))
    except OSError as error:
        raise ClearheadError(f"cannot read {error.filename!r}: {error.strerror}") from error
    scaled = _attach_scales(cursor, variables)
    aliases = {alias: name for alias, name in aliases.items() if name in scaled}
    named = scaled | {alias: scaled[name] for alias, name in aliases.items()}
    return CTranslate2Checkpoint(
        spec=spec,
        revision=revision,
        config=config,
        settings={name: _read(path, variable).item() for name, variable in named.items() if not variable.shape},
        tensors=LazyTensors(
            (name for name, variable in named.items() if variable.shape),
            lambda name: _scaled(path, name, named[name]),
        ),
        aliases=aliases,
    )


class _Cursor:
    """A place in the file; every step is checked against the file's length before it is taken."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.left_bytes = path.stat().st_size

    def error(self, problem: str) -> ClearheadError:
        return ClearheadError(f"{str(self.path)!r} is no sound CTranslate2 model: {problem}")

    def numbers(self, layout: str) -> tuple[int, ...]:
        packed = struct.Struct(f"<{layout}")
        self._step(packed.size)
        return packed.unpack(self.file.read(packed.size))

    def string(self) -> str:
        (num_bytes,) = self.numbers("H")
        self._step(num_bytes)
        text = self.file.read(num_bytes)
        if not text.endswith(b"\0") or not text.isascii():
            raise self.error(f"{text[:40]!r} is no name")
        return text[:-1].decode("ascii")

    def skip(self, num_bytes: int) -> int:
        """Step over `num_bytes`; returns the offset at which they begin."""
        self._step(num_bytes)
        return self.file.seek(num_bytes, 1) - num_bytes

    def _step(self, num_bytes: int) -> None:
        if num_bytes > self.left_bytes:
            raise self.error(f"{num_bytes} bytes are due where {self.left_bytes} are left")
        self.left_bytes -= num_bytes


def _parse_opening(cursor: _Cursor) -> tuple[str, int]:
    (version,) = cursor.numbers("I")
    if version != VERSION:
        raise cursor.error(f"its version is {version}; version {VERSION} can be read, convert the model anew")
    spec = cursor.string()
    (revision,) = cursor.numbers("I")
    return spec, revision


def _parse_variables(cursor: _Cursor) -> dict[str, _Variable]:
    variables: dict[str, _Variable] = {}
    (num_variables,) = cursor.numbers("I")
    for _ in range(num_variables):
        name = cursor.string()
        (rank,) = cursor.numbers("B")
        if rank > MAX_RANK:
            raise cursor.error(f"{name!r} has {rank} dimensions; at most {MAX_RANK} are allowed")
        shape = cursor.numbers(f"{rank}I")
        type_number, num_bytes = cursor.numbers("BI")
        if type_number >= len(TYPES):
            raise cursor.error(f"{name!r} is of type {type_number}; types 0 to {len(TYPES) - 1} are known")
        variable = _Variable(shape=shape, dtype=TYPES[type_number], offset_bytes=cursor.skip(num_bytes))
        if 0 in shape or variable.num_bytes != num_bytes:
            raise cursor.error(f"{name!r} of shape {shape} cannot have {num_bytes} bytes")
        if name in variables:
            raise cursor.error(f"{name!r} occurs twice")
        variables[name] = variable
    return variables


def _parse_aliases(cursor: _Cursor, variables: dict[str, _Variable]) -> dict[str, str]:
    aliases: dict[str, str] = {}
    (num_aliases,) = cursor.numbers("I")
    for _ in range(num_aliases):
        alias, name = cursor.string(), cursor.string()
        if name not in variables:
            raise cursor.error(f"{alias!r} stands for {name!r}, which is missing")
        if alias in variables or alias in aliases:
            raise cursor.error(f"{alias!r} occurs twice")
        aliases[alias] = name
    if cursor.left_bytes:
        raise cursor.error(f"{cursor.left_bytes} bytes follow its end")
    return aliases


def _attach_scales(cursor: _Cursor, variables: dict[str, _Variable]) -> dict[str, _Variable]:
    """The same variables, those with a scale holding it and the scale's own entry gone."""
    scaled = dict(variables)
    for name, variable in variables.items():
        scale = variables.get(f"{name}_scale")
        if scale is None or not variable.shape or variable.dtype not in QUANTIZED_TYPES:
            continue
        if scale.shape not in ((), (1,), variable.shape[:1]) or not scale.dtype.is_floating_point:
            raise cursor.error(f"{name!r} of shape {variable.shape} cannot have a scale of shape {scale.shape}")
        scaled[name] = replace(variable, scale=scale)
        del scaled[f"{name}_scale"]
    return scaled


def _scaled(path: Path, name: str, variable: _Variable) -> Tensor:
    tensor = _read(path, variable)
    if variable.scale is None:
        return tensor
    scale = _read(path, variable.scale).float()
    if not (scale.isfinite() & (scale > 0)).all():
        raise ClearheadError(f"{str(path)!r}: the scale of {name!r} is not positive and finite throughout")
    return tensor.float() / scale.reshape(-1, *(1,) * (tensor.dim() - 1))


def _read(path: Path, variable: _Variable) -> Tensor:
    stored = np.fromfile(path, dtype=np.uint8, count=variable.num_bytes, offset=variable.offset_bytes)
    if len(stored) != variable.num_bytes:
        raise ClearheadError(f"{str(path)!r} was cut short while it was being read")
    return torch.from_numpy(stored).view(variable.dtype).reshape(variable.shape)
