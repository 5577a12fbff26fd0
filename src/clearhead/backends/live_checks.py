"""Checks of what only exists at run time: the modules of a network, the arguments of a call, and the machine.

    reason = unsupported_network_reason(network, "cuda")      # None: supported

capability.py decides what follows from a config alone. Users may replace modules, register hooks, enable gradients or
turn dropout on at any time; a backend then leaves the computation to the modules. A kernel that takes tensors checks
their shapes and dtypes itself (cpu_kernels/attention.py).
"""

import os
import shutil
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.architecture import Causal, Chunked, LatentAttention, SlidingWindow
from clearhead.backends.capability import DTYPES, Backend, unsupported_reason, unsupported_weights
from clearhead.backends.cpu_kernels import is_inference, kernels_support_prompts
from clearhead.backends.modules import PackedLinear, PackedMatrix, PackedMixture
from clearhead.cache import KeyValueCache, PackedCache, PagedEncoderOutput
from clearhead.model import (
    Attention,
    Block,
    DeviationNormLayer,
    EncoderOutput,
    FeedForwardLayer,
    JointNorm,
    LatentAttentionLayer,
    LayerStack,
    MixtureLayer,
    OffsetLayerNorm,
    PerHeadNorm,
    Residual,
    RmsNormLayer,
    RouterLayer,
    Transformer,
    Xielu,
    fused_attention,
)

# Exactly these types: a subclass, such as a LoRA layer, computes something that the kernels do not.
_KNOWN_MODULES = {
    *(nn.ModuleList, Block, Residual, Attention, FeedForwardLayer, nn.Linear, PackedLinear),
    *(RmsNormLayer, nn.LayerNorm, nn.Identity, nn.Dropout),
}
_KNOWN_ON_CPU = {
    *(*_KNOWN_MODULES, OffsetLayerNorm, DeviationNormLayer, PerHeadNorm, JointNorm, Xielu, nn.Embedding),
    *(MixtureLayer, RouterLayer, PackedMixture, PackedMatrix, LatentAttentionLayer),
}
_KNOWN_IN_PAGES = {*_KNOWN_MODULES, LatentAttentionLayer, MixtureLayer, RouterLayer, nn.Embedding}  # UMT5's buckets

_SLOTS_PER_BLOCK = 16  # BLOCK in pages.h: slots of a page that the CPU kernels read together

# --- networks


def unsupported_network_reason(network: Transformer, backend: Backend) -> str | None:
    """Return why `network` cannot run on `backend` in its present state, or None if it can."""
    if reason := unsupported_reason(network.config, backend):
        return reason
    # The CPU kernels look at the first parameter only: `can_be_planned` checks all of them, and the modules, whenever
    # a sequence begins, because they may change in between.
    first = next(network.parameters())
    dtypes = {first.dtype} if backend == "cpu" else {parameter.dtype for parameter in network.parameters()}
    if reason := unsupported_weights(dtypes, first.device.type, backend):
        return reason
    if backend != "cpu" and not _has_original_modules(network, backend):
        return "modules were replaced or have hooks"
    if backend != "cpu" and any(
        isinstance(part, PackedMatrix) and part.packed.needs_widening for part in network.modules()
    ):
        return "some packed weights have a format of the CPU kernels; load the model onto the GPU"
    return None


def _has_original_modules(network: Transformer, backend: Backend) -> bool:
    """Return whether the blocks consist of known modules, and no module of a stack or of the head has a hook."""
    stacks = [stack for stack in (network.encoder, network.decoder) if stack is not None]
    around = [part for stack in stacks for part in (stack.embedding, stack.final_norm)]
    around += [part for part in (network.head, *(stack.relative_bias for stack in stacks)) if part is not None]
    hooks = hooks_of([module for part in around for module in part.modules()])
    known = _KNOWN_IN_PAGES if backend == "paged" else _KNOWN_MODULES
    blocks = [module for stack in stacks for module in stack.layers.modules()]
    return _are_known(blocks, known) and not any(hooks)


def can_be_planned(stack: LayerStack) -> bool:
    """Return whether the CPU kernels can compute the layers: known modules, one dtype, no hooks and no dropout."""
    modules, tensors = planned_modules(stack), (*stack.layers.parameters(), *stack.final_norm.parameters())
    kinds = {(tensor.dtype, tensor.device.type) for tensor in tensors}
    supported = any(kinds == {(dtype, "cpu")} for dtype in DTYPES["cpu"])
    drops = any(module.training for module in dropout_modules(modules))
    is_wide = any(isinstance(module, PackedMatrix) and module.packed.is_wide for module in modules)
    return supported and _are_known(modules, _KNOWN_ON_CPU) and not drops and not is_wide


def planned_modules(stack: LayerStack) -> list[nn.Module]:
    """Return the modules that a plan of the CPU kernels replaces."""
    shared: nn.Module | None = stack.relative_bias
    return [*stack.layers.modules(), *stack.final_norm.modules(), *(() if shared is None else shared.modules())]


def _are_known(modules: list[nn.Module], known: set[type[nn.Module]] = _KNOWN_MODULES) -> bool:
    """Return whether all modules are of known types and none has a hook."""
    return {type(module) for module in modules} <= known and not any(hooks_of(modules))


def hooks_of(modules: list[nn.Module]) -> list[dict[int, Any]]:
    """Return the dictionaries in which the modules keep their forward hooks."""
    return [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]


def dropout_modules(modules: list[nn.Module]) -> list[nn.Module]:
    """Return the modules that apply dropout. They may be in training mode alone, to estimate a model's uncertainty."""
    return [module for module in modules if isinstance(module, nn.Dropout | Attention)]


# --- calls


def runs_in_cpu_kernels(
    stack: LayerStack,
    tokens: Tensor,
    attention_mask: Tensor | None,
    encoder_output: EncoderOutput | None,
    cache: Any,
    options: dict[str, Any],
) -> bool:
    """Return whether a forward call only adds tokens to a cache: no gradient, dropout, other kernel or recording."""
    if stack.training or not is_inference() or tokens.device.type != "cpu":
        return False
    # `absorb` says how latent attention is computed, not what; the kernels always absorb.
    is_plain = options.keys() <= {"kernel", "absorb"} and options.get("kernel", fused_attention) is fused_attention
    if not is_plain or tokens.ndim != 2:
        return False
    if isinstance(cache, PackedCache):
        storages = [cache.storage]
        if isinstance(encoder_output, PagedEncoderOutput):
            storages.append(encoder_output.storage)
        elif encoder_output is not None or _attends_to_sources(stack):
            return False
        return all(packed_tokens_run_in_cpu_kernels(stack, storage.pool.page_size) for storage in storages)
    if not isinstance(cache, KeyValueCache):
        return False
    is_single_token = tokens.shape[1] == 1
    if _attends_to_sources(stack):
        return (
            is_single_token
            and encoder_output is not None
            and encoder_output.cross_keys_values is not None
            and len(encoder_output.states) == len(tokens)
        )
    if encoder_output is not None:
        return False
    if any(isinstance(layer.attention, LatentAttention) for layer in stack.stack.layers):
        is_padded = attention_mask is not None or cache.attention_mask is not None
        return kernels_support_prompts() and cache.is_contiguous and not is_padded
    # A ring buffer returns a copy when many tokens are written at once, and the kernels write in place.
    return is_single_token or (kernels_support_prompts() and cache.is_contiguous)


def packed_tokens_run_in_cpu_kernels(stack: LayerStack, page_size: int) -> bool:
    """Return whether the kernels attend to pages of this size, with the patterns of all layers."""
    patterns = (layer.attention.pattern for layer in stack.stack.layers)
    supported = all(isinstance(pattern, Causal | SlidingWindow | Chunked) for pattern in patterns)
    return kernels_support_prompts() and page_size % _SLOTS_PER_BLOCK == 0 and supported


def _attends_to_sources(stack: LayerStack) -> bool:
    """Return whether the layers have cross-attention. All of a stack do, or none."""
    return stack.stack.layers[0].cross_attention is not None


# --- machines


@lru_cache
def triton_available(device: torch.device) -> bool:
    """Return whether Triton can run on `device`: it is installed, finds a C compiler, and the GPU is Volta or later."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    installed = find_spec("triton") is not None and compiler is not None
    return installed and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0)
