"""Read tensors of a checkpoint by name, each when it is needed.

    tensors = open_safetensors([Path("model.safetensors")], where="model.safetensors"); tensors["lm_head.weight"]

Pickle files are never opened, whatever their names are.
"""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.files import MAX_JSON_TABLE_BYTES, check_regular, parse_json

_FLOAT8_BLOCK = 128  # rows and columns that share a scale
_SCALE_SUFFIX = "_scale_inv"  # name of the scales = name of the float8 tensor + this
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

Value = TypeVar("Value")


class LazyTensors(Mapping[str, Value]):
    """A mapping that holds only the names and calls `read` for each access."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Value]):
        self.names, self.read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> Value:
        if name not in self.names:
            raise KeyError(name)
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class _SafetensorsFile:
    """An open safetensors file whose tensors are read into memory of their own.

    The safetensors library maps the file instead: if it is cut short later, using the weights kills the process.
    """

    def __init__(self, path: Path):
        check_regular(path)
        try:
            with safe_open(path, framework="pt") as checked:  # compares all offsets with the size of the file
                names = set(checked.keys())
            self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            weakref.finalize(self, os.close, self.descriptor)
            num_header_bytes = int.from_bytes(self.read_bytes(0, 8), "little")
            if num_header_bytes > MAX_JSON_TABLE_BYTES:
                raise ClearheadError(f"{path} has a header of {num_header_bytes} bytes; at most {MAX_JSON_TABLE_BYTES}")
            header = self.read_bytes(8, num_header_bytes).tobytes().decode()
            self.header = parse_json(header, f"the header of {path} is ")
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise ClearheadError(f"{path} is not a complete safetensors file: {error}") from None
        self.header.pop("__metadata__", None)
        if self.header.keys() != names:
            raise ClearheadError(f"{path} changed while it was opened; load it again")
        self.path, self.start = path, 8 + num_header_bytes

    def dtype_name(self, name: str) -> str:
        """Return the dtype of a tensor as the file spells it."""
        return str(self.header[name]["dtype"])

    def read(self, name: str) -> Tensor:
        """Return a tensor."""
        entry = self.header[name]
        if entry["dtype"] not in _DTYPES:
            raise RuntimeError(f"its dtype {entry['dtype']} is not supported")
        first, end = entry["data_offsets"]
        stored = self.read_bytes(self.start + first, end - first)
        return torch.from_numpy(stored).view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])

    def read_bytes(self, start: int, num_bytes: int) -> NDArray[np.uint8]:
        """Return a part of the file; raise RuntimeError if it is not there any more."""
        stored = np.empty(num_bytes, dtype=np.uint8)
        with open(self.descriptor, "rb", buffering=0, closefd=False) as file:
            file.seek(start)
            num_read = 0
            while num_read < num_bytes:  # one call reads at most 2 GB
                count = file.readinto(stored[num_read:].data)
                if not count:
                    raise RuntimeError("the file has become shorter since its header was read")
                num_read += count
        return stored


def open_safetensors(paths: Iterable[Path], where: str) -> LazyTensors[Tensor]:
    """Return the tensors of one or several safetensors files; float8 tensors are multiplied by their scales.

    `where` is the file or folder that error messages name.
    """
    files: dict[str, _SafetensorsFile] = {}  # tensor name -> the open file that contains it
    for path in paths:
        file = _SafetensorsFile(path)
        for name in file.header:
            if name in files:
                raise ClearheadError(f"{where}: the tensor {name} is in two files")
            files[name] = file
    names = [name for name in files if not _is_scale(name, files)]
    return LazyTensors(names, partial(_read_tensor, files, where))


def _is_scale(name: str, files: Mapping[str, _SafetensorsFile]) -> bool:
    """Return whether a tensor holds the scales of a float8 tensor."""
    scaled = name.removesuffix(_SCALE_SUFFIX)
    return scaled != name and scaled in files and files[scaled].dtype_name(scaled) == "F8_E4M3"


def _read_tensor(files: Mapping[str, _SafetensorsFile], where: str, name: str) -> Tensor:
    try:
        tensor = files[name].read(name)
        scales = name + _SCALE_SUFFIX
        if tensor.dtype == torch.float8_e4m3fn and scales in files:
            return dequantize_float8(tensor, files[scales].read(scales))
    except (OSError, RuntimeError) as error:
        raise ClearheadError(f"{where}: the tensor {name} cannot be read: {error}") from None
    return tensor


def dequantize_float8(tensor: Tensor, scales: Tensor) -> Tensor:
    """Multiply each block of 128 x 128 values by its scale (DeepSeek-V3, §3.3.2); return bfloat16."""
    if tensor.ndim != 2:
        raise RuntimeError(f"only matrices can have a scale for each block, not tensors of {tensor.ndim} dimensions")
    num_rows, num_columns = tensor.shape
    num_blocks = (-(-num_rows // _FLOAT8_BLOCK), -(-num_columns // _FLOAT8_BLOCK))
    if scales.shape != num_blocks:
        raise RuntimeError(
            f"scales of shape {tuple(scales.shape)} for {num_blocks} blocks of {_FLOAT8_BLOCK} x {_FLOAT8_BLOCK}"
        )
    by_row = scales.float().repeat_interleave(_FLOAT8_BLOCK, 0)[:num_rows]
    by_element = by_row.repeat_interleave(_FLOAT8_BLOCK, 1)[:, :num_columns]
    return (tensor.float() * by_element).to(torch.bfloat16)
