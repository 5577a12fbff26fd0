"""A checkpoint's tensors as a mapping: name to tensor, each read when it is asked for.

    tensors = read_safetensors([Path("model.safetensors")], where="model.safetensors"); tensors["lm_head.weight"]

Only safetensors are read here: a pickle is never opened, whatever it is called.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from clearhead.errors import ClearheadError

FLOAT8_BLOCK = 128
SCALE_ENDING = "_scale_inv"  # of the tensor beside a float8 one


class LazyTensors(Mapping[str, Tensor]):
    """Keeps the names; the file keeps the numbers."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Tensor]):
        self.names, self.read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(name)
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def read_safetensors(paths: Iterable[Path], where: str) -> LazyTensors:
    """The tensors of one or several files, whichever file each is in; float8 ones with their scales applied."""
    holders: dict[str, Any] = {}  # tensor name -> its open file
    for path in paths:
        opened = open_safetensors(path)
        for name in opened.keys():  # noqa: SIM118  (not a dict)
            if name in holders:
                raise ClearheadError(f"{where}: the tensor {name} stands in two files")
            holders[name] = opened
    names = [name for name in holders if not is_scale(name, holders)]
    return LazyTensors(names, partial(read_tensor, holders, where))


def open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ClearheadError(f"{path} is not a whole safetensors file: {error}") from None


def is_scale(name: str, holders: Mapping[str, Any]) -> bool:
    scaled = name.removesuffix(SCALE_ENDING)
    return scaled != name and scaled in holders and holders[scaled].get_slice(scaled).get_dtype() == "F8_E4M3"


def read_tensor(holders: Mapping[str, Any], where: str, name: str) -> Tensor:
    try:
        tensor: Tensor = holders[name].get_tensor(name)
        scale = name + SCALE_ENDING
        if tensor.dtype == torch.float8_e4m3fn and scale in holders:
            return dequantize_float8(tensor, holders[scale].get_tensor(scale))
    except (SafetensorError, RuntimeError) as error:
        raise ClearheadError(f"{where}: the tensor {name} cannot be read: {error}") from None
    return tensor


def dequantize_float8(tensor: Tensor, scale: Tensor) -> Tensor:
    """Square blocks with one scale each (DeepSeek-V3, §3.3.2)."""
    if tensor.ndim != 2:
        raise RuntimeError(f"scales of blocks belong to matrices, not to {tensor.ndim} dimensions")
    rows, columns = tensor.shape
    blocks = (-(-rows // FLOAT8_BLOCK), -(-columns // FLOAT8_BLOCK))
    if scale.shape != blocks:
        raise RuntimeError(f"scales {tuple(scale.shape)} for {blocks} blocks of {FLOAT8_BLOCK} x {FLOAT8_BLOCK}")
    by_row = scale.float().repeat_interleave(FLOAT8_BLOCK, 0)[:rows]
    spread = by_row.repeat_interleave(FLOAT8_BLOCK, 1)[:, :columns]
    return (tensor.float() * spread).to(torch.bfloat16)
