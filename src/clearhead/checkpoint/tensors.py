"""Read tensors of a checkpoint by name, each when it is needed.

    tensors = open_safetensors([Path("model.safetensors")], where="model.safetensors"); tensors["lm_head.weight"]

Pickle files are never opened, whatever their names are.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.tensor_files import SafetensorsFile

_FLOAT8_BLOCK = 128  # rows and columns that share a scale
_SCALE_SUFFIX = "_scale_inv"  # name of the scales = name of the float8 tensor + this

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


def open_safetensors(paths: Iterable[Path], where: str, *, raw: bool = False) -> LazyTensors[Tensor]:
    """Return the tensors of one or several safetensors files; those in float8 are dequantized unless `raw`.

    `where` is the file or folder that error messages name.
    """
    files: dict[str, SafetensorsFile] = {}  # tensor name -> the open file that contains it
    for path in paths:
        file = SafetensorsFile(path)
        for name in file.names:
            if name in files:
                raise ClearheadError(f"{where}: the tensor {name} is in two files")
            files[name] = file
    if raw:
        return LazyTensors(files, lambda name: files[name].read(name))
    names = [name for name in files if not _is_scale(name, files)]
    return LazyTensors(names, partial(_read_tensor, files, where))


def _is_scale(name: str, files: Mapping[str, SafetensorsFile]) -> bool:
    """Return whether a tensor holds the scales of a float8 tensor."""
    scaled = name.removesuffix(_SCALE_SUFFIX)
    return scaled != name and scaled in files and files[scaled].dtype_name(scaled) == "F8_E4M3"


def _read_tensor(files: Mapping[str, SafetensorsFile], where: str, name: str) -> Tensor:
    try:
        tensor = files[name].read(name)
        scales = name + _SCALE_SUFFIX
        if tensor.dtype == torch.float8_e4m3fn and scales in files:
            return dequantize_float8(tensor, files[scales].read(scales))
    except (ClearheadError, RuntimeError) as error:
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
            f"its scales have shape {tuple(scales.shape)}; "
            f"with blocks of {_FLOAT8_BLOCK} x {_FLOAT8_BLOCK}, it must be {num_blocks}"
        )
    by_row = scales.float().repeat_interleave(_FLOAT8_BLOCK, 0)[:num_rows]
    by_element = by_row.repeat_interleave(_FLOAT8_BLOCK, 1)[:, :num_columns]
    return (tensor.float() * by_element).to(torch.bfloat16)
