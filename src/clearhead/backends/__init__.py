"""Backends compute the same numbers as the modules of model/, faster. The modules stay the reference for all of them.

    accelerate(pack_network(network, "int4"))

    capability    what a backend supports, decided from a config
    live_checks   what only exists at run time: replaced modules, hooks, arguments of a call, the machine
    packed/       storage formats for weights in 8 or 4 bits
    memory        give freed memory back to the operating system
    cpu_kernels/  C++ kernels and their binding
    sensitivity   which matrices keep 8 bits when the others are packed in 4
    modules       network modules with packed weights, or with products in the CPU kernels
    lowering      a block's weights and settings in the form that both backends read
    lowering_*    its parts: projections, norms, scores, feed-forward branches, latent attention
    cpu/          the decoder on a CPU: all layers in one call of the kernels
    cuda/         the decoder on an NVIDIA GPU: a whole step in one CUDA graph

docs/fast-path.md explains how they work and how they are verified.
"""

from clearhead.backends.capability import unsupported_reason
from clearhead.backends.cpu import AcceleratedStack, accelerate, has_independent_rows
from clearhead.backends.cpu_kernels import build_in_background, find_new_kernels, load_kernel_library
from clearhead.backends.cuda import AsyncTokens, GraphDecoder, GraphLayer, PagedDecoder, SeatedSequence, fused_linear
from clearhead.backends.live_checks import triton_available, unsupported_network_reason
from clearhead.backends.lowering_norms import NormModule
from clearhead.backends.lowering_projections import Projection
from clearhead.backends.memory import return_freed_memory
from clearhead.backends.modules import (
    PackedLinear,
    PackedMatrix,
    PackedTable,
    is_packable,
    is_packed,
    pack_network,
    set_packed_weight,
)
from clearhead.backends.packed import (
    ELEMENTS_PER_CHUNK,
    KEPT_BLOCK_TYPES,
    PACKED_PARTS,
    Bits,
    PackedWeight,
    fit_offset,
    fit_symmetric,
    inverse,
    is_consistent,
    pack,
    pack_calibrated,
    pack_gguf_blocks,
    pack_quants,
    packed_from_tensors,
    widen,
)
from clearhead.backends.sensitivity import choose_bits, gets_more_bits, is_sensitive, pack_parameter

__all__ = [
    "ELEMENTS_PER_CHUNK",
    "KEPT_BLOCK_TYPES",
    "PACKED_PARTS",
    "AcceleratedStack",
    "AsyncTokens",
    "Bits",
    "GraphDecoder",
    "GraphLayer",
    "NormModule",
    "PackedLinear",
    "PackedMatrix",
    "PackedTable",
    "PackedWeight",
    "PagedDecoder",
    "Projection",
    "SeatedSequence",
    "accelerate",
    "build_in_background",
    "choose_bits",
    "find_new_kernels",
    "fit_offset",
    "fit_symmetric",
    "fused_linear",
    "gets_more_bits",
    "has_independent_rows",
    "inverse",
    "is_consistent",
    "is_packable",
    "is_packed",
    "is_sensitive",
    "load_kernel_library",
    "pack",
    "pack_calibrated",
    "pack_gguf_blocks",
    "pack_network",
    "pack_parameter",
    "pack_quants",
    "packed_from_tensors",
    "return_freed_memory",
    "set_packed_weight",
    "triton_available",
    "unsupported_network_reason",
    "unsupported_reason",
    "widen",
]
