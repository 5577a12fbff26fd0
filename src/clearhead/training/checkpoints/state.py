"""Turn the state of optimizers and random generators into named tensors, and restore it.

    tensors = {"optimizer": flatten_optimizer(optimizer, weights), "randomness": capture_random_state()}
    restore_optimizer(optimizer, weights, saved.tensors("optimizer", weights))

`weights` maps names to the network's own tensors. The name of an optimizer tensor is `weight name/key`, for example
`decoder.final_norm.weight/exp_avg`.
"""

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from clearhead.errors import ClearheadError, quote

_MERSENNE_WORDS = 624


def flatten_optimizer(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of an optimizer by name. It is empty before the first step."""
    tensors = {}
    for name, weight in weights.items():
        for key, value in optimizer.state.get(weight, {}).items():
            assert isinstance(value, Tensor), f"{type(optimizer).__name__} stores {key} as {type(value).__name__}"
            tensors[f"{name}/{key}"] = value
    return tensors


def restore_optimizer(
    optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """Restore what `flatten_optimizer` returned. The tensors of other optimizers are ignored."""
    states: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition("/")
        if name not in weights:
            raise ClearheadError(
                f"the checkpoint has optimizer state for {quote(name)}, which this model does not have"
            )
        if tensor.ndim and tensor.shape != weights[name].shape:
            raise ClearheadError(
                f"the optimizer state {quote(full_name)} has shape {tuple(tensor.shape)}, but its weight has shape"
                f" {tuple(weights[name].shape)}"
            )
        states.setdefault(name, {})[key] = tensor
    names = {id(weight): name for name, weight in weights.items()}
    own_names = [names[id(weight)] for group in optimizer.param_groups for weight in group["params"]]
    own_states = {number: states[name] for number, name in enumerate(own_names) if name in states}
    missing = [name for name in own_names if name not in states]
    if own_states and missing:
        raise ClearheadError(
            f"the checkpoint has no optimizer state for {quote(missing[0])}; use the recipe of that run"
        )
    optimizer.load_state_dict(optimizer.state_dict() | {"state": own_states})


@torch.no_grad()
def restore_weights(weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into the network's own. Raise ClearheadError if a name or a shape differs."""
    differing = sorted(weights.keys() ^ tensors.keys())
    if differing:
        owner = "the model" if differing[0] in weights else "the checkpoint"
        raise ClearheadError(f"only {owner} has {quote(differing[0])}; the checkpoint belongs to another model")
    for name, weight in weights.items():
        if weight.shape != tensors[name].shape:
            raise ClearheadError(
                f"{quote(name)} has shape {tuple(tensors[name].shape)} in the checkpoint but {tuple(weight.shape)} in "
                "the model; the checkpoint belongs to another model"
            )
        weight.copy_(tensors[name])


def seed_generators(seed: int) -> None:
    """Seed every global generator, so that two runs of one recipe write equal checkpoints."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def capture_random_state() -> dict[str, Tensor]:
    """Return the state of every global generator: torch's, the current CUDA device's, numpy's and Python's."""
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


def restore_random_state(tensors: Mapping[str, Tensor]) -> None:
    """Restore what `capture_random_state` returned. Raise ClearheadError if it is damaged."""
    _check_random_state(tensors)
    try:
        torch.set_rng_state(tensors["torch"])
    except (RuntimeError, TypeError):  # torch checks the content of its own state
        raise ClearheadError("the saved random state of torch is damaged") from None
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    gauss = tensors["python_gauss"].tolist()
    random.setstate((3, tuple(tensors["python"].tolist()), gauss[0] if gauss else None))
    *keys, position = tensors["numpy"].tolist()
    numpy_gauss = tensors["numpy_gauss"].tolist()
    words = np.array(keys, dtype=np.uint32)
    np.random.set_state(("MT19937", words, position, len(numpy_gauss), numpy_gauss[0] if numpy_gauss else 0.0))


def _check_random_state(tensors: Mapping[str, Tensor]) -> None:
    """Raise ClearheadError unless the generators can be set to this state."""
    for name in ("torch", "python", "python_gauss", "numpy", "numpy_gauss"):
        if name not in tensors:
            raise ClearheadError(f"the saved random state has no {quote(name)}")
    for name in ("python", "numpy"):  # the words of a Mersenne Twister and the position in them
        words, length = tensors[name], _MERSENNE_WORDS + 1
        if words.dtype != torch.int64 or words.shape != (length,) or not _are_words(words):
            raise ClearheadError(f"the saved random state of {name} is damaged")
    for name in ("python_gauss", "numpy_gauss"):
        if tensors[name].dtype != torch.float64 or tensors[name].shape not in ((0,), (1,)):
            raise ClearheadError(f"the saved random state has a damaged {quote(name)}")


def _are_words(words: Tensor) -> bool:
    """Return whether all words have 32 bits and the last one is a position among the others."""
    return bool((words >= 0).all() and (words < 2**32).all() and words[-1] <= _MERSENNE_WORDS)
