"""Load a model from a checkpoint, or create one with random weights.

model = load("smollm2", dtype="bfloat16"); fresh = create("llama-3.2-1b", seed=1)
"""

from pathlib import Path
from typing import Literal, get_args

import torch

from clearhead.api.model import Model
from clearhead.api.recurrent import RecurrentBaseline
from clearhead.architecture import ModelConfig
from clearhead.backends import (
    accelerate,
    is_packed,
    kernel_library,
    pack_network,
    why_no_cpu_kernels,
    why_no_cuda_graph,
)
from clearhead.checkpoint import Progress, folder_tokenizer, is_recurrent, load_recurrent, open_model
from clearhead.errors import ClearheadError, unknown_name
from clearhead.families import preset
from clearhead.home import expand_user
from clearhead.model import Transformer
from clearhead.tokenization import Tokenizer

Weights = Literal["full", "stored", "int8", "int4"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def load(
    what: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
    *,
    weights: Weights = "full",
    fast: bool | None = None,
) -> Model:
    """A model by installed name, folder, .gguf file or hub id; `dtype` None keeps the stored precision.

    `weights`: `int8` or `int4` packs them, `stored` runs a .gguf file from its own blocks; all else is then kept in
    bfloat16, unless `dtype` says otherwise. `fast`: tokens are made in kernels; True builds them for this processor,
    which takes seconds once, None uses them where they are built, False leaves it to PyTorch.
    """
    if weights not in get_args(Weights):
        raise unknown_name("weights", str(weights), get_args(Weights))
    precision = resolve_dtype(dtype) or (None if weights == "full" else torch.bfloat16)
    place = resolve_device(device, precision)
    if is_recurrent(what):
        if fast or weights != "full":
            raise ClearheadError(f"{what} holds a recurrent network, which has full weights and no fast step")
        folder = expand_user(what)
        network, special_ids = load_recurrent(folder, precision, place)
        return RecurrentBaseline(network, folder_tokenizer(folder), None, special_ids)
    loaded = open_model(what, precision, place, progress, keep_blocks=weights == "stored")
    model = Model(**vars(loaded), in_graph=fast is not False)
    if weights in ("int8", "int4"):
        pack_network(model.network, weights)
    if model.network.device.type == "cuda":
        reason = why_no_cuda_graph(model.network)  # a graph needs no preparation
    else:
        reason = (
            None if fast is False or accelerate(model.network, build=bool(fast)) else why_no_cpu_kernels(model.network)
        )
        if fast and is_packed(model.network) and kernel_library(build=True) is not None:
            reason = None  # its products, one by one
    if fast and reason:
        raise ClearheadError(f"there is no fast step for this model: {reason}")
    return model


def create(
    config: ModelConfig | str,
    tokenizer: Tokenizer | None = None,
    seed: int = 0,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> Model:
    """A new model with random weights, from a config or the name of a preset; a seed gives the same on any device."""
    config, dtype = preset(config) if isinstance(config, str) else config, resolve_dtype(dtype)
    device = resolve_device(device, dtype)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every GPU's too
        network = Transformer(config).eval()
    return Model(network.to(device=device, dtype=dtype), tokenizer)


def resolve_device(device: torch.device | str | None, dtype: torch.dtype | None = None) -> torch.device | None:
    """One that is here and has this precision, before a checkpoint is read for it."""
    if device is None:
        return None
    try:
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ClearheadError(f"there is no device {str(device)!r} here; cpu always works") from None
    place = torch.device(device)
    if place.type == "mps" and dtype == torch.float64:
        raise ClearheadError("Apple's GPUs have no float64; float32 is the widest there")
    return place


def resolve_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and name not in DTYPES:
        raise unknown_name("dtype", name, DTYPES)
    return DTYPES.get(name)
