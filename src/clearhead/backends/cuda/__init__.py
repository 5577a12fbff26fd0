"""The CUDA backend: a decode step of Triton kernels, replayed as one CUDA graph.

paged_decoder      PagedDecoder: packed prompts and captured steps over the pages of many sequences
seats              the static buffers of its sequences; sampler: their next tokens; async_tokens: tokens for the host
paged_layers       its layers: branches that read and write pages, and the norms and sums around them
paged_steps        how a layer attends: running sequences, packed prompts, packed sources
paged_encoder      PagedEncoder: packed sources of an encoder-decoder, and their keys and values for cross-attention
latent, mixture    latent attention over pages; experts without waiting for the host
paged_launch       the kernels over pages as functions of tensors
triton_pages       attention of one new token per sequence over its pages
triton_chunks      attention of packed prompts over pages
triton_rows        norms and activations of many rows
triton_sampling    logits to tokens without sorting
triton_logits      logits with the options of each sequence
triton_candidates, triton_filters
                   top_k, top_p and min_p
triton_latent, triton_experts
                   latent attention over pages; the experts of a few tokens
triton_heads       query and key heads, normalized and rotated
decoder            GraphDecoder: one batch of sequences over a contiguous cache
layers             a block with its part of that cache, at fixed addresses
launch             its Triton kernels as functions of tensors
triton_products    y = residual + activation(W norm(x)), for plain and packed weights
triton_groups      their groups: scales, and integer products
triton_unpacking   packed weights to plain ones, for products of many rows
triton_embedding   the tokens of running sequences to rows of the token table
triton_attention   attention of one new token over a contiguous cache
"""

from clearhead.backends.cuda.async_tokens import AsyncTokens
from clearhead.backends.cuda.decoder import GraphDecoder
from clearhead.backends.cuda.launch import fused_linear
from clearhead.backends.cuda.layers import GraphLayer
from clearhead.backends.cuda.paged_decoder import PagedDecoder
from clearhead.backends.cuda.seats import SeatedSequence

__all__ = ["AsyncTokens", "GraphDecoder", "GraphLayer", "PagedDecoder", "SeatedSequence", "fused_linear"]
