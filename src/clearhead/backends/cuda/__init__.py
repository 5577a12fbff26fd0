"""The CUDA backend: a decode step of Triton kernels, replayed as one CUDA graph.

decoder            GraphDecoder: prefill, capture and replay of a step; AsyncTokens: tokens on their way to the host
layers             a block with its part of the cache, at fixed addresses
launch             the Triton kernels as functions of tensors
triton_products    y = residual + activation(W norm(x)), for plain and packed weights
triton_attention   attention of one new token over the cache
"""

from clearhead.backends.cuda.decoder import AsyncTokens, GraphDecoder
from clearhead.backends.cuda.launch import fused_linear
from clearhead.backends.cuda.layers import GraphLayer

__all__ = ["AsyncTokens", "GraphDecoder", "GraphLayer", "fused_linear"]
