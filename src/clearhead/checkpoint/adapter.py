"""Save and load LoRA adapters on their own: a few megabytes that change a model which is stored elsewhere.

    save_adapter(folder, Adapter(base="smollm2", scale=2.0, matrices={"decoder.layers.0.attention.query": (a, b)}))
    merge_adapter(network, read_adapter(folder))

A folder has adapter.json (the format, the base model and α / r) and adapter.safetensors with two matrices for each
linear layer: `NAME.reduce` (A, rank × in) and `NAME.expand` (B, out × rank). Merging computes W + (α / r) · B A.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from clearhead.errors import ClearheadError, quote
from clearhead.files import read_json_object, write_text
from clearhead.home import expand_user
from clearhead.tensor_files import read_safetensors, write_safetensors

_DESCRIPTION_FILE, _TENSOR_FILE = "adapter.json", "adapter.safetensors"
_FORMAT = "clearhead-lora-1"


@dataclass(frozen=True)
class Adapter:
    """The low-rank matrices of a fine-tuned model, and the model that they change."""

    base: str  # an installed name, a folder or a file
    scale: float  # α / r
    matrices: dict[str, tuple[Tensor, Tensor]]  # name of a linear layer -> A (rank, in) and B (out, rank)


def is_adapter(path: str | Path) -> bool:
    """Return whether a path is a folder with an adapter."""
    try:
        return (expand_user(path) / _DESCRIPTION_FILE).is_file()
    except OSError:  # a name that is too long to be a path
        return False


def save_adapter(folder: Path, adapter: Adapter) -> None:
    """Write an adapter. The description is written last, so an incomplete folder is not an adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{name}.{part}": matrix.detach().cpu().contiguous()
        for name, matrices in adapter.matrices.items()
        for part, matrix in zip(("reduce", "expand"), matrices, strict=True)
    }
    (folder / _DESCRIPTION_FILE).unlink(missing_ok=True)
    write_safetensors(folder / _TENSOR_FILE, tensors)
    description = {"format": _FORMAT, "base": adapter.base, "scale": adapter.scale}
    write_text(folder / _DESCRIPTION_FILE, json.dumps(description, indent=2) + "\n")


def read_adapter(path: str | Path) -> Adapter:
    """Read an adapter. Raise ClearheadError if a file is damaged."""
    folder = expand_user(path)
    description = read_json_object(folder / _DESCRIPTION_FILE)
    base, scale = description.get("base"), description.get("scale")
    if description.get("format") != _FORMAT or not isinstance(base, str) or not isinstance(scale, int | float):
        raise ClearheadError(f"{folder / _DESCRIPTION_FILE} does not describe an adapter of the format {_FORMAT}")
    if not math.isfinite(scale):
        raise ClearheadError(f"{folder / _DESCRIPTION_FILE} has the scale {scale}; it must be finite")
    tensors, _ = read_safetensors(folder / _TENSOR_FILE)
    names = {name.rpartition(".")[0] for name in tensors}
    if not names or tensors.keys() != {f"{name}.{part}" for name in names for part in ("reduce", "expand")}:
        raise ClearheadError(f"{folder / _TENSOR_FILE} must have the tensors `reduce` and `expand` for each layer")
    matrices = {name: (tensors[f"{name}.reduce"], tensors[f"{name}.expand"]) for name in sorted(names)}
    return Adapter(base, float(scale), matrices)


@torch.no_grad()
def merge_adapter(network: nn.Module, adapter: Adapter) -> None:
    """Add an adapter to the weights of a network. Raise ClearheadError, without a change, if it does not fit."""
    layers = dict(network.named_modules())
    changes: list[tuple[Tensor, Tensor]] = []
    for name, (reduce, expand) in adapter.matrices.items():
        layer = layers.get(name)
        if not isinstance(layer, nn.Linear):
            raise ClearheadError(
                f"the adapter changes {quote(name)}, which {adapter.base} does not have as a full matrix"
            )
        fits = reduce.ndim == expand.ndim == 2 and reduce.shape[0] == expand.shape[1]
        if not fits or layer.weight.shape != (expand.shape[0], reduce.shape[1]):
            raise ClearheadError(
                f"the adapter of {quote(name)} has the shapes {tuple(reduce.shape)} and {tuple(expand.shape)}, which "
                f"do not fit a weight of shape {tuple(layer.weight.shape)}; it belongs to another model than "
                f"{adapter.base}"
            )
        change = adapter.scale * (expand.float() @ reduce.float())
        changes.append((layer.weight, change.to(layer.weight.device, layer.weight.dtype)))
    for weight, change in changes:
        weight += change
