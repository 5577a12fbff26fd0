"""Packed weights in Clearhead's own folders: their parts are stored as tensors and loaded with the same bits.

    tensors, description = split_packed_weights(network); tensors["head.weight.quants"], description["head.weight"]

A packed weight is stored under its own name and those of its parts: NAME.quants, NAME.scales and, in some formats,
NAME.offsets, NAME.high_bits, NAME.group_scales and NAME.group_offsets. clearhead.json lists the names with the number
of columns, which may be less than the stored ones.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.backends import PACKED_PARTS, PackedMatrix, PackedWeight, is_consistent, packed_from_tensors
from clearhead.checkpoint.placement import stored_tensors
from clearhead.checkpoint.tensors import LazyTensors
from clearhead.errors import ClearheadError
from clearhead.families import Settings
from clearhead.model import MixtureLayer

PACKED_KEY = "packed_weights"  # in clearhead.json


def split_packed_weights(network: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all tensors of a network, and for clearhead.json the columns of its packed weights by their names."""
    tensors, columns = stored_tensors(network), {}
    for module_name, module in _packed_modules(network):
        name = _weight_name(network, module_name)
        for part in PACKED_PARTS:
            tensor = tensors.pop(f"{module_name}.{part}", None)
            if tensor is not None:
                tensors[f"{name}.{part}"] = tensor
        columns[name] = module.columns
    return tensors, columns


def packed_dtype(network: nn.Module) -> torch.dtype | None:
    """Return the dtype in which a network with packed weights computes; None if it has none."""
    return next((module.dtype for _, module in _packed_modules(network)), None)


def _packed_modules(network: nn.Module) -> Iterator[tuple[str, PackedMatrix]]:
    for name, module in network.named_modules():
        if isinstance(module, PackedMatrix):
            yield name, module


def _weight_name(network: nn.Module, module_name: str) -> str:
    """Return the name of a packed weight in a network with full weights."""
    owner_name, _, attribute = module_name.rpartition(".")
    owner = network.get_submodule(owner_name)
    return module_name if attribute == "weight" or isinstance(owner, MixtureLayer) else f"{module_name}.weight"


def join_packed_weights(
    tensors: Mapping[str, Tensor], description: Settings, where: str
) -> Mapping[str, Tensor | PackedWeight]:
    """Return the tensors of a file with its packed weights in place of their parts."""
    columns = description.object(PACKED_KEY).data
    parts = {f"{name}.{part}" for name in columns for part in PACKED_PARTS}

    def read(name: str) -> Tensor | PackedWeight:
        return _read_packed(tensors, name, columns[name], where) if name in columns else tensors[name]

    for name in columns:
        if name in tensors:
            raise ClearheadError(f"{where}: {name[:100]!r} is stored both packed and in full")
    return LazyTensors([*(name for name in tensors if name not in parts), *columns], read)


def _read_packed(tensors: Mapping[str, Tensor], name: str, columns: Any, where: str) -> PackedWeight:
    """Return a packed weight; raise ClearheadError if its parts do not fit together."""
    missing = next((part for part in PACKED_PARTS[:2] if f"{name}.{part}" not in tensors), None)
    if missing is not None:
        raise ClearheadError(f"{where} lacks the tensor {name[:100]}.{missing}; it is incomplete")
    present = {part: tensors[f"{name}.{part}"] for part in PACKED_PARTS if f"{name}.{part}" in tensors}
    packed = packed_from_tensors(present, columns)
    if type(columns) is not int or not is_consistent(packed):
        raise ClearheadError(f"{where}: the parts of the packed weight {name[:100]!r} do not fit together")
    return packed
