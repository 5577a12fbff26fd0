"""Load a model from a checkpoint or from a module of transformers, or create one with random weights.

model = load("smollm2", dtype="bfloat16"); untrained = create("llama-3.2-1b", seed=1)
"""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from clearhead.api.devices import resolve_device, resolve_dtype
from clearhead.api.model import Model
from clearhead.api.recurrent import RecurrentBaseline
from clearhead.architecture import ModelConfig
from clearhead.backends import (
    accelerate,
    build_in_background,
    is_packed,
    load_kernel_library,
    return_freed_memory,
    unsupported_network_reason,
)
from clearhead.checkpoint import (
    LoadOptions,
    Progress,
    Weights,
    is_adapter,
    is_peft_adapter,
    is_recurrent,
    load_folder_tokenizer,
    load_recurrent,
    merge_adapter,
    merge_peft_adapter,
    open_model,
    read_adapter,
    read_module,
    read_peft_adapter,
    read_transformers_tokenizer,
)
from clearhead.errors import ClearheadError, unknown_name
from clearhead.families import preset, shrink
from clearhead.home import expand_user
from clearhead.model import Transformer
from clearhead.threads import use_default_threads
from clearhead.tokenization import Tokenizer


def load(
    model: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
    *,
    weights: Weights = "full",
    fast: bool | None = None,
) -> Model:
    """Load a model with its tokenizer.

    model: the name of an installed model (see clearhead.get), a folder, a .gguf file, or a Hub id. For the folder of a
    LoRA adapter, ours or one of the PEFT library, the model that it was trained for is loaded and the adapter is merged
    into it.
    dtype: "float32", "bfloat16", "float16" or "float64". None keeps the dtype of the file, and reads a quantized file
    in float32.
    device: "cpu", "cuda", "cuda:1", "mps", … None means the CPU.
    progress: called as progress(name, done, total) for each tensor.
    weights: "full"; "int8" or "int4", which quantize the matrices on loading; "stored", which computes with the
    quantized blocks of a .gguf file or a quantized folder. All but "full" use bfloat16 for everything else unless
    `dtype` is given. One tensor at a time is read and quantized, so that the full weights are never in memory together.
    fast: None uses the C++ kernels on a CPU. If they are missing, another process compiles them once, and texts that
    begin after that use them; PyTorch computes until then, and a warning says so. True waits until they are compiled,
    and raises ClearheadError if that fails or they do not support the model. False uses PyTorch only.
    """
    if weights not in get_args(Weights):
        raise unknown_name("weights", str(weights), get_args(Weights))
    use_default_threads()
    dtype = resolve_dtype(dtype) or (None if weights == "full" else torch.bfloat16)
    device = resolve_device(device, dtype)
    given = model
    adapter = read_adapter(model) if is_adapter(model) else None
    if adapter is not None:
        if weights != "full":
            raise ClearheadError(f"an adapter can be merged only into full weights; leave out weights={weights!r}")
        model = adapter.base
    peft_folder, peft = model, read_peft_adapter(model) if is_peft_adapter(model) else None
    if peft is not None:
        if weights != "full" or not peft.base:
            change = f"leave out weights={weights!r}" if weights != "full" else "name it in base_model_name_or_path"
            raise ClearheadError(f"an adapter can be merged only into the full weights of a base model; {change}")
        model = peft.base
    if is_recurrent(model):
        if fast or weights != "full":
            given = f"weights={weights!r}" if weights != "full" else "fast=True"
            raise ClearheadError(
                f"{model} is a recurrent network, which has neither packed weights nor a fast path; leave out {given}"
            )
        folder = expand_user(model)
        network, special_ids = load_recurrent(folder, dtype, device)
        return RecurrentBaseline(network, load_folder_tokenizer(folder), None, special_ids)
    try:
        parts = open_model(model, LoadOptions(dtype=dtype, device=device, weights=weights, progress=progress))
    except ClearheadError as error:
        if adapter is None and peft is None:
            raise
        raise ClearheadError(f"{given} is an adapter, whose base model cannot be loaded: {error}") from None
    if adapter is not None:
        merge_adapter(parts.network, adapter)
    if peft is not None:
        merge_peft_adapter(parts.network, parts.family, peft)
        own_tokenizer = load_folder_tokenizer(expand_user(peft_folder))  # often with the chat template of the training
        parts = replace(parts, tokenizer=own_tokenizer or parts.tokenizer)
    if adapter is not None or peft is not None:
        parts = replace(parts, folder=None)  # its weights are others now
    loaded = Model(**vars(parts), use_cuda_graph=fast is not False)
    reason = _use_fast_path(loaded.network, fast)
    return_freed_memory()
    if fast and reason:
        raise ClearheadError(f"the fast path does not support this model: {reason}; leave out fast=True")
    return loaded


def from_huggingface(module: nn.Module, tokenizer: Any = None, *, fast: bool | None = None) -> Model:
    """Return a model with a copy of the weights of a transformers module, without writing a folder.

    module: a module of a class of transformers, such as LlamaForCausalLM; docs/models.md lists the classes. The model
    has its device and dtype.
    tokenizer: a tokenizer of transformers, or one of ours. Without one, the model accepts only token ids.
    fast: as for `load`.
    """
    use_default_threads()
    parts = read_module(module)
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer = read_transformers_tokenizer(tokenizer)
    loaded = Model(**vars(replace(parts, tokenizer=tokenizer)), use_cuda_graph=fast is not False)
    reason = _use_fast_path(loaded.network, fast)
    if fast and reason:
        raise ClearheadError(f"the fast path does not support this model: {reason}; leave out fast=True")
    return loaded


def _use_fast_path(network: Transformer, fast: bool | None) -> str | None:
    """Accelerate the network where possible, unless `fast` is False; return the reason if it is not possible."""
    if network.device.type == "cuda":
        return unsupported_network_reason(network, "paged")  # the graph needs no preparation
    if fast is False:
        return None
    reason = unsupported_network_reason(network, "cpu")
    if reason and not is_packed(network):
        return reason
    note = None if fast else build_in_background()
    if note:
        warnings.warn(note, stacklevel=3)
    if accelerate(network, build=bool(fast), later=note is not None):
        return None
    if fast and load_kernel_library(build=True) is not None:
        return None  # packed: its matrix products still run in the kernels, one by one
    return reason


def create(
    config: ModelConfig | str,
    tokenizer: Tokenizer | None = None,
    seed: int = 0,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    *,
    tiny: bool = False,
) -> Model:
    """Create a model with random weights.

    config: a ModelConfig or the name of a preset (see clearhead.presets).
    tokenizer: converts text to token ids. Without one, the model accepts only token ids.
    seed: seed of the weights; the same seed gives the same weights on every device.
    dtype: "float32", "bfloat16", "float16" or "float64". None means float32.
    device: "cpu", "cuda", "cuda:1", "mps", … None means the CPU.
    tiny: shrink the architecture to toy size, with the same choices in every layer and a vocabulary of 257 tokens:
    bytes and the end of a text.
    """
    if isinstance(config, str):
        config = preset(config)
    if tiny:
        config = shrink(config)
    use_default_threads()
    dtype = resolve_dtype(dtype)
    device = resolve_device(device, dtype)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed every GPU
        network = Transformer(config).eval()
    return Model(network.to(device=device, dtype=dtype), tokenizer)
