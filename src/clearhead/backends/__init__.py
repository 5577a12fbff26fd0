"""The same numbers sooner: weights in few bits, tokens in kernels, and the plain network as the oracle of both.

    accelerate(pack_network(network, "int4"))

packed        weights in groups of 32 that share a scale; GGUF's own blocks
lowering      a block's weights and settings as a backend reads them
cpu           on a processor: one call for a prompt or a token
cuda          on an NVIDIA GPU: the whole step in one graph
"""

from clearhead.backends.cpu.library import kernel_library
from clearhead.backends.cpu.stack import AcceleratedStack, accelerate, why_no_cpu_kernels
from clearhead.backends.cuda.decoder import AsyncTokens, GraphDecoder, why_no_cuda_graph
from clearhead.backends.cuda.launch import Matrix, Norm, multiply, triton_runs
from clearhead.backends.cuda.layers import StaticLayer
from clearhead.backends.lowering import unknown_in
from clearhead.backends.packed.formats import NATIVE_BLOCK_TYPES, Bits, Packed, pack_gguf_blocks
from clearhead.backends.packed.modules import (
    AcceleratedHead,
    PackedLinear,
    PackedMatrix,
    PackedTable,
    is_packed,
    pack_network,
)

__all__ = [
    "NATIVE_BLOCK_TYPES",
    "AcceleratedHead",
    "AcceleratedStack",
    "AsyncTokens",
    "Bits",
    "GraphDecoder",
    "Matrix",
    "Norm",
    "Packed",
    "PackedLinear",
    "PackedMatrix",
    "PackedTable",
    "StaticLayer",
    "accelerate",
    "is_packed",
    "kernel_library",
    "multiply",
    "pack_gguf_blocks",
    "pack_network",
    "triton_runs",
    "unknown_in",
    "why_no_cpu_kernels",
    "why_no_cuda_graph",
]
