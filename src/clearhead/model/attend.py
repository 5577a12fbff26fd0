"""Attention kernels: softmax(Q Kᵀ · scale) V, as a fused kernel and as a step-by-step reference.

    output = fused_attention(q, k, v, Scoring(mask=Mask(causal=True), scale=0.125))

`reference_attention` computes every step explicitly, and `attention_steps` also returns its scores and weights.
`fused_attention` computes the same output with PyTorch's scaled_dot_product_attention. Both follow Vaswani et al. 2017,
§3.2.1, where our scale is 1/√d_k, and compute in this order (book A2, A5):

    scores = q kᵀ · scale, then softcap, · temperature, + bias, mask
    weights = softmax(scores)
    output = weights v
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor
from torch.nn.functional import dropout, scaled_dot_product_attention

from clearhead.model.masks import Mask

_CUDNN_LOCK = Lock()  # cuDNN attention is switched for the whole process, so only one thread may change and restore it


@dataclass(frozen=True)
class Scoring:
    """How attention scores are computed and turned into weights."""

    mask: Mask
    scale: float
    softcap: float | None = None
    temperature: Tensor | None = None  # multiplies the capped scores, broadcastable to (B, N, T, S)
    bias: Tensor | None = None  # added after the temperature, broadcastable to (B, N, T, S)
    dropout: float = 0.0
    sinks: Tensor | None = None  # scores (N,) that join the softmax of each query and are then dropped


@dataclass(frozen=True)
class AttentionSteps:
    """The output of attention together with its intermediate results."""

    output: Tensor  # (B, N, T, H of the values)
    scores: Tensor  # (B, N, T, S), before the mask
    weights: Tensor  # (B, N, T, S), each row sums to 1, or to 0 if all of its keys are masked


# q (B, N, T, H), k (B, K, S, H), v (B, K, S, H of the values) -> (B, N, T, H of the values).
# Query head n attends to key-value head n // (N / K).
AttentionKernel = Callable[[Tensor, Tensor, Tensor, Scoring], Tensor]


def attention_steps(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> AttentionSteps:
    """Compute attention step by step and return the output, the scores and the weights."""
    scores = compute_scores(q, k, scoring)
    weights = weigh_keys(scores, explicit_mask(scoring.mask, q, k), scoring).to(v.dtype)
    return AttentionSteps(weigh_values(dropout(weights, scoring.dropout), v), scores, weights)


def compute_scores(q: Tensor, k: Tensor, scoring: Scoring) -> Tensor:
    """Return the scores (B, N, T, S) before the mask."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = (q @ k.transpose(-2, -1)) * scoring.scale
    scores = apply_softcap(scores, scoring.softcap)
    if scoring.temperature is not None:
        scores = scores * scoring.temperature
    return scores if scoring.bias is None else scores + scoring.bias


def weigh_keys(scores: Tensor, allowed: Tensor | None, scoring: Scoring) -> Tensor:
    """Return the weights (B, N, T, S) of scores, with those of all keys that are not allowed set to 0."""
    if scoring.sinks is None:
        return masked_softmax(scores, allowed)
    return _softmax_with_sinks(scores, allowed, scoring.sinks)


def weigh_values(weights: Tensor, v: Tensor) -> Tensor:
    """Return the sum of the values with these weights (B, N, T, S): (B, N, T, H of the values)."""
    return weights @ v.repeat_interleave(weights.shape[1] // v.shape[1], dim=1)


def reference_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Attention kernel that computes every step explicitly."""
    return attention_steps(q, k, v, scoring).output


def fused_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Attention kernel that calls PyTorch's scaled_dot_product_attention.

    Scores with a softcap, a temperature or sinks fall back to `reference_attention`: the fused kernel has none of them.
    """
    if scoring.sinks is not None or not is_fusible(scoring.softcap, scoring.temperature):
        return reference_attention(q, k, v, scoring)
    mask_or_bias = scoring.mask.allowed
    if scoring.bias is not None:
        allowed = explicit_mask(scoring.mask, q, k)
        mask_or_bias = scoring.bias.to(q.dtype)
        mask_or_bias = mask_or_bias if allowed is None else mask_or_bias.masked_fill(~allowed, -torch.inf)
    is_inference = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    length_varies = q.is_cuda and q.shape[2] != k.shape[2] and is_inference  # decoding with a cache
    if length_varies and mask_or_bias is not None and q.shape[1] != k.shape[1]:
        # Without cuDNN, the only kernel that takes a mask needs equal numbers of query and key-value heads.
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    with without_cudnn() if length_varies else nullcontext():
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask_or_bias,
            dropout_p=scoring.dropout,
            is_causal=scoring.mask.causal and mask_or_bias is None,  # a bias already contains the mask
            scale=scoring.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )


def is_fusible(softcap: float | None, temperature: object | None) -> bool:
    """Return whether the fused kernel can compute scores with this softcap and temperature; it has neither."""
    return softcap is None and temperature is None


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Disable the cuDNN attention kernel, which builds an execution plan for every new length.

    cuDNN is PyTorch's first choice on Hopper, and a plan takes 30 to 250 ms (H200, torch 2.11). With a cache, every
    token has a new length: Llama 1B generated 15 tokens a second with cuDNN and generates 60 to 75 without.
    """
    with _CUDNN_LOCK:
        was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(was_enabled)


def apply_softcap(x: Tensor, softcap: float | None) -> Tensor:
    """Return softcap · tanh(x / softcap): close to x while small, never beyond ± softcap (Gemma 2, Grok)."""
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def explicit_mask(mask: Mask, q: Tensor, k: Tensor) -> Tensor | None:
    """Return the mask as a bool tensor, broadcastable to (B, N, T, S), or None if every key is allowed."""
    if not mask.causal:
        return mask.allowed
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()


def _softmax_with_sinks(scores: Tensor, allowed: Tensor | None, sinks: Tensor) -> Tensor:
    """Return the softmax over the allowed keys and the sink (N,) of each head, without the weight of the sink."""
    sink = sinks[:, None, None].expand(*scores.shape[:-1], 1).to(scores.dtype)
    if allowed is not None:
        allowed = torch.cat((allowed, allowed.new_ones(*allowed.shape[:-1], 1)), dim=-1)
    return masked_softmax(torch.cat((scores, sink), dim=-1), allowed)[..., :-1]


def masked_softmax(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Return the softmax over the allowed keys. A query without any allowed key gets zeros, never NaN.

    The mask selects scores. Adding a large negative number instead overflows in half precision and yields uniform
    weights where everything is masked; multiplying turns a negative score into +∞ (errata 5 and 8 of the book).
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if allowed is None:
        return scores.softmax(dim=-1)
    return scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1).masked_fill(~allowed, 0.0)
