"""Tensors that a GGUF file does not hold as such: the unfolding matrix of latent attention, and numbers in metadata.

    tensors = assembled_tensors(file, architecture, file.read); rules = divided_rules(architecture, rules)

Latent attention (DeepSeek) has one matrix that makes keys and values of the latent vector. Today's files hold the part
of the keys, transposed in every head, and that of the values; older files hold the matrix itself. The parameters of
Apertus' activation are lists in the metadata, with a number per layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Size, Tensor

from clearhead.architecture import LatentAttention, ModelConfig
from clearhead.backends import PackedWeight
from clearhead.checkpoint.gguf import GgufFile
from clearhead.checkpoint.tensors import LazyTensors
from clearhead.errors import ClearheadError
from clearhead.families import GgufArchitecture, TensorRule, to_plain_value

_WHOLE, _KEYS, _VALUES = "attn_kv_b.weight", "attn_k_b.weight", "attn_v_b.weight"
Stored = Tensor | PackedWeight


def assembled_tensors(
    file: GgufFile, architecture: GgufArchitecture, read: Callable[[str], Stored]
) -> LazyTensors[Stored]:
    """Return the tensors of a file under the names of the architecture's table; `read` reads a stored tensor."""
    readers: dict[str, Callable[[str], Stored]] = dict.fromkeys(file.tensors, read)
    if architecture.splits_heads:
        for name in [name for name in readers if name.endswith(_KEYS)]:
            value_name, whole_name = name.removesuffix(_KEYS) + _VALUES, name.removesuffix(_KEYS) + _WHOLE
            if value_name in readers and whole_name not in readers:
                del readers[name], readers[value_name]
                readers[whole_name] = lambda whole: _join_heads(file, whole.removesuffix(_WHOLE))
    for pattern, key in architecture.in_metadata.items():
        for layer, number in enumerate(_numbers(file, key)):
            readers[pattern.replace("{layer}", str(layer))] = partial(_one_number, number)
    return LazyTensors(readers, lambda name: readers[name](name))


def _join_heads(file: GgufFile, start: str) -> Tensor:
    """Return the matrix (N·(P + V), R) of the parts (N, R, P) and (N, V, R)."""
    keys, values = file.read(start + _KEYS), file.read(start + _VALUES)
    if keys.ndim != 3 or values.ndim != 3 or (len(keys), keys.shape[1]) != (len(values), values.shape[2]):
        raise ClearheadError(
            f"{file.path}: the shapes of {start}{_KEYS} and {start}{_VALUES}, {tuple(keys.shape)} and "
            f"{tuple(values.shape)}, do not fit together"
        )
    return torch.cat([keys.transpose(1, 2).float(), values.float()], dim=1).flatten(0, 1)


def _one_number(number: float, name: str) -> Tensor:
    """Return a vector of one number, whatever its name is."""
    return torch.tensor([number])


def _numbers(file: GgufFile, key: str) -> list[float]:
    values = to_plain_value(file.metadata.get(key, []))
    if not isinstance(values, list) or not all(isinstance(value, float) for value in values):
        raise ClearheadError(f"{file.path}: {key} is {values!r:.40}; it must be a list of numbers, one for each layer")
    return values


@dataclass(frozen=True)
class _HeadPart(TensorRule):
    """One part of the unfolding matrix, for writing."""

    is_keys: bool = True

    def split(self, foreign: Tensor, shapes: list[Size], config: ModelConfig) -> list[Tensor]:
        raise NotImplementedError("the parts are joined before they are read")

    def join(self, parts: list[Tensor], config: ModelConfig) -> Tensor:
        attention = config.output_stack.layers[0].attention
        assert isinstance(attention, LatentAttention)
        heads = parts[0].unflatten(0, (attention.num_heads, attention.plain_width + attention.value_width))
        keys, values = heads.split([attention.plain_width, attention.value_width], dim=1)
        return keys.transpose(1, 2).contiguous() if self.is_keys else values.contiguous()


def divided_rules(architecture: GgufArchitecture, rules: Mapping[str, TensorRule]) -> dict[str, TensorRule]:
    """Return the rules of the tensors that a file holds: matrices in parts, and none that is in the metadata."""
    divided: dict[str, TensorRule] = {}
    in_metadata = tuple(f".{key}" for key in architecture.in_metadata.values())
    for name, rule in rules.items():
        if architecture.splits_heads and name.endswith(_WHOLE):
            start = name.removesuffix(_WHOLE)
            divided[start + _KEYS] = _HeadPart(rule.own_names)
            divided[start + _VALUES] = _HeadPart(rule.own_names, is_keys=False)
        elif not in_metadata or not name.endswith(in_metadata):
            divided[name] = rule
    return divided


def numbers_in_metadata(
    architecture: GgufArchitecture, rules: Mapping[str, TensorRule], tensors: Mapping[str, Tensor]
) -> dict[str, list[float]]:
    """Return the keys whose values are numbers of all layers; `tensors` are ours by their names."""
    found: dict[str, list[float]] = {}
    for name, rule in rules.items():
        for key in architecture.in_metadata.values():
            if name.endswith(f".{key}"):
                found.setdefault(key, []).append(float(tensors[rule.own_names[0]].detach()))
    return found
