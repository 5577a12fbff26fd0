"""softmax(QKᵀ · scale) V: the one door to the attention kernel, and the two twins behind it.

    output = fused(q, k, v, Scoring(mask=Mask(causal=True), scale=0.125))

`reference_attention` says exactly what is computed, step by step, and `attention_steps` shows its scores and weights;
`fused_attention` gives the same output from PyTorch's scaled_dot_product_attention. Vaswani et al. 2017, §3.2.1: our scale
is their 1/√d_k. Order: scale, cap, temperature, bias, mask, softmax (book A2, A5).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor
from torch.nn.functional import dropout, scaled_dot_product_attention

from clearhead.model.masks import Mask

SWITCHING = Lock()  # cuDNN is on or off for all threads: one that found it off by another would leave it so


@dataclass(frozen=True)
class Scoring:
    """How scores become weights."""

    mask: Mask
    scale: float
    softcap: float | None = None
    temperature: Tensor | None = None  # times the capped scores, broadcastable to (B, N, T, S)
    bias: Tensor | None = None  # added after that, broadcastable to (B, N, T, S)
    dropout: float = 0.0


@dataclass(frozen=True)
class AttentionSteps:
    output: Tensor  # (B, N, T, H of values)
    scores: Tensor  # (B, N, T, S), before the mask
    weights: Tensor  # (B, N, T, S), rows sum to 1, or to 0 where everything is masked


# q (B, N, T, H), k (B, K, S, H), v (B, K, S, H of values) -> (B, N, T, H of values);
# query head n reads key-value head n // (N / K)
AttentionKernel = Callable[[Tensor, Tensor, Tensor, Scoring], Tensor]


def attention_steps(q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> AttentionSteps:
    queries_per_key = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(queries_per_key, dim=1), v.repeat_interleave(queries_per_key, dim=1)
    scores = (q @ k.transpose(-2, -1)) * how.scale
    scores = softcap_scores(scores, how.softcap)
    if how.temperature is not None:
        scores = scores * how.temperature
    if how.bias is not None:
        scores = scores + how.bias
    weights = masked_softmax(scores, explicit_mask(how.mask, q, k)).to(v.dtype)
    return AttentionSteps(dropout(weights, how.dropout) @ v, scores, weights)


def reference_attention(q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> Tensor:
    return attention_steps(q, k, v, how).output


def fused_attention(q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> Tensor:
    if how.softcap is not None or how.temperature is not None:
        return reference_attention(q, k, v, how)  # nothing the fused kernel can be told
    added = how.mask.allowed
    if how.bias is not None:
        allowed = explicit_mask(how.mask, q, k)
        added = how.bias.to(q.dtype)
        added = added if allowed is None else added.masked_fill(~allowed, -torch.inf)
    grows = q.is_cuda and q.shape[2] != k.shape[2] and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if grows and added is not None and q.shape[1] != k.shape[1]:  # with a mask, only a kernel for equal numbers is left
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    with without_cudnn() if grows else nullcontext():
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=added,
            dropout_p=how.dropout,
            is_causal=how.mask.causal and added is None,  # with a bias the mask is in it
            scale=how.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )


@contextmanager
def without_cudnn() -> Iterator[None]:
    """PyTorch's first choice on Hopper makes a plan for each new length, which takes 30 to 250 ms (H200, torch 2.11).

    With a cache every token has another length: Llama 1B made 15 tokens a second so, and makes 60 to 75 without.
    """
    with SWITCHING:
        allowed = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(allowed)


def softcap_scores(x: Tensor, cap: float | None) -> Tensor:
    """cap · tanh(x / cap): nearly x while small, never beyond ± cap (Gemma 2, Grok)."""
    return x if cap is None else cap * torch.tanh(x / cap)


def explicit_mask(mask: Mask, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as a tensor, broadcastable to (B, N, T, S)."""
    if not mask.causal:
        return mask.allowed
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()


def masked_softmax(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Softmax over the keys that may be seen; a row that sees nothing is all zeros, never NaN.

    The mask selects: adding a large negative number overflows in half precision and leaves a uniform row where
    everything is masked; multiplying turns a negative score into +∞ (slips 5 and 8 of the book).
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if allowed is None:
        return scores.softmax(dim=-1)
    return scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1).masked_fill(~allowed, 0.0)
