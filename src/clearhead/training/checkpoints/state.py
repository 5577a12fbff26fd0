"""What a run must remember besides its weights, as named tensors: the optimizer's and the random generators' state.

    tensors = {"optimizer": flatten_optimizer(optimizer, weights), "randomness": capture_randomness()}
    restore_optimizer(optimizer, weights, saved.tensors("optimizer", weights))

`weights` maps names to the network's own tensors. An optimizer's tensor is called `name/key`, as in
`decoder.final_norm.weight/exp_avg`.
"""

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from clearhead.errors import ClearheadError


def flatten_optimizer(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Empty before the first step. Weights of another optimizer are left out."""
    flat = {}
    for name, weight in weights.items():
        for key, value in optimizer.state.get(weight, {}).items():
            assert isinstance(value, Tensor), f"{type(optimizer).__name__} keeps {key} as {type(value).__name__}"
            flat[f"{name}/{key}"] = value
    return flat


def restore_optimizer(
    optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """Put back what `flatten_optimizer` took; tensors of weights that another optimizer moves are passed over."""
    states: dict[str, dict[str, Tensor]] = {}
    for flat_name, tensor in tensors.items():
        name, _, key = flat_name.rpartition("/")
        if name not in weights:
            raise ClearheadError(f"the checkpoint holds optimizer state for {name!r}, which this model does not have")
        states.setdefault(name, {})[key] = tensor
    names = {id(weight): name for name, weight in weights.items()}
    moved = [names[id(weight)] for group in optimizer.param_groups for weight in group["params"]]
    held = {number: states[name] for number, name in enumerate(moved) if name in states}
    missing = [name for name in moved if name not in states]
    if held and missing:
        raise ClearheadError(f"the checkpoint holds no optimizer state for {missing[0]!r}; the recipe has changed")
    optimizer.load_state_dict(optimizer.state_dict() | {"state": held})


@torch.no_grad()
def restore_weights(weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into the network's own: every name on both sides, every shape the same."""
    differing = sorted(weights.keys() ^ tensors.keys())
    if differing:
        where = "the model" if differing[0] in weights else "the checkpoint"
        raise ClearheadError(f"only {where} has {differing[0]!r}; the checkpoint is of another model")
    for name, weight in weights.items():
        if weight.shape != tensors[name].shape:
            shapes = f"{tuple(tensors[name].shape)}, the model has {tuple(weight.shape)}"
            raise ClearheadError(f"the checkpoint's {name!r} is {shapes}; the checkpoint is of another model")
        weight.copy_(tensors[name])


def capture_randomness() -> dict[str, Tensor]:
    """The state of every global generator: torch's, that of the current CUDA device, numpy's and Python's."""
    version, words, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    assert (version, legacy["bit_generator"]) == (3, "MT19937")
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*legacy["state"]["key"].tolist(), legacy["state"]["pos"]]),
        "numpy_gauss": torch.tensor([legacy["gauss"]] * legacy["has_gauss"], dtype=torch.float64),
    }
    if torch.cuda.is_initialized():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors


def restore_randomness(tensors: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    gauss = tensors["python_gauss"].tolist()
    random.setstate((3, tuple(tensors["python"].tolist()), gauss[0] if gauss else None))
    *keys, position = tensors["numpy"].tolist()
    numpy_gauss = tensors["numpy_gauss"].tolist()
    words = np.array(keys, dtype=np.uint32)
    np.random.set_state(("MT19937", words, position, len(numpy_gauss), numpy_gauss[0] if numpy_gauss else 0.0))
