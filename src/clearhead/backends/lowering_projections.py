"""Lower linear layers: a weight, plain or packed, and its bias; layers with the same input are merged into one.

    projection = merge_projections(attention.query, attention.key, attention.value)

No weight is stored twice: after merging, the modules hold views of the merged matrix. Their parameters stay the same
objects, so that an optimizer created earlier still trains them.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from clearhead.backends.modules import PackedLinear
from clearhead.backends.packed import PackedWeight, packed_from_tensors, widen_all

LinearModule = nn.Linear | PackedLinear


@dataclass(frozen=True)
class PackedParts:
    """Packed weights of different formats, one below the other: (N, K)."""

    parts: tuple[PackedWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def num_bytes(self) -> int:
        """Memory of all parts."""
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True)
class Projection:
    """A weight (N, K), plain or packed, and its bias (N,)."""

    weight: Tensor | PackedWeight | PackedParts
    bias: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def num_bytes(self) -> int:
        """Memory of the weight, without the bias."""
        weight = self.weight
        return weight.numel() * weight.element_size() if isinstance(weight, Tensor) else weight.num_bytes


def merge_projections(*modules: LinearModule, keep_formats: bool = False) -> Projection:
    """Return one projection with the rows of all modules, which then hold views of its weight and bias.

    With `keep_formats`, packed weights of different formats stay as they are.
    """
    packed = [module.packed for module in modules if isinstance(module, PackedLinear)]
    has_all_biases = len({module.bias is None for module in modules}) == 1
    if keep_formats and len(packed) == len(modules) and has_all_biases and len({each.format for each in packed}) > 1:
        return Projection(PackedParts(tuple(packed)), _merge_biases(modules))
    return Projection(merge_weights(modules), _merge_biases(modules))


def _merge_biases(modules: tuple[LinearModule, ...]) -> Tensor | None:
    """Return the biases of all modules, which then hold views of them; None if there are none.

    A module without a bias, such as the key projection of Whisper beside the others, gets rows of zeros.
    """
    some = next((module.bias for module in modules if module.bias is not None), None)
    if some is None:
        return None
    sizes = [module.packed.shape[0] if isinstance(module, PackedLinear) else module.out_features for module in modules]
    biases = [
        some.new_zeros(size) if module.bias is None else module.bias.detach()
        for module, size in zip(modules, sizes, strict=True)
    ]
    merged = _concatenate_rows(biases)
    for module, part in zip(modules, merged.split(sizes), strict=True):
        if module.bias is not None:
            module.bias.data = part
    return merged


def merge_weights(modules: tuple[LinearModule, ...]) -> Tensor | PackedWeight:
    """Return one matrix with the rows of all weights, and let the modules hold views of it."""
    if len(modules) == 1:
        module = modules[0]
        return module.packed if isinstance(module, PackedLinear) else module.weight.detach().contiguous()
    packed = [module for module in modules if isinstance(module, PackedLinear)]
    if len(packed) == len(modules) and len({module.packed.format for module in packed}) == 1:
        return _merge_packed_weights(packed)
    if len(packed) == len(modules):
        wide = widen_all([module.packed for module in packed])
        if wide is not None and len({weight.format for weight in wide}) == 1:
            for module, weight in zip(packed, wide, strict=True):
                module.set_packed(weight)
            return _merge_packed_weights(packed)
    if packed:  # formats differ, so the merged weight is unpacked
        return torch.cat([module.weight.detach() for module in modules])
    plain = [module for module in modules if isinstance(module, nn.Linear)]
    merged = _concatenate_rows([module.weight.detach() for module in plain])
    for module, rows in zip(plain, merged.split([len(module.weight) for module in plain]), strict=True):
        module.weight.data = rows
    return merged


def _merge_packed_weights(modules: list[PackedLinear]) -> PackedWeight:
    parts = [module.packed for module in modules]
    names = parts[0].tensors
    merged = packed_from_tensors(
        {name: _concatenate_rows([part.tensors[name] for part in parts]) for name in names}, parts[0].columns
    )
    start = 0
    for module, part in zip(modules, parts, strict=True):
        module.set_packed(merged.rows(slice(start, start + part.shape[0])))
        start += part.shape[0]
    return merged


def _concatenate_rows(parts: list[Tensor]) -> Tensor:
    """Return all rows in one tensor: a copy, or a view if an earlier merge has placed the parts one after another."""
    for part, following in pairwise(parts):
        one_storage = part.untyped_storage().data_ptr() == following.untyped_storage().data_ptr()
        if not one_storage or part.data_ptr() + part.nbytes != following.data_ptr() or not part.is_contiguous():
            return torch.cat(parts)
    return parts[0].as_strided((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].stride())
