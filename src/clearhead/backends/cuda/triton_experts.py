"""Triton kernels for the experts of a few tokens: each token reads the matrices of the experts that it has chosen.

open_experts[grid](...)      inner = activation(gate x) · up x, for every token and chosen expert
close_experts[grid](...)     y = Σ weight · down inner, over the chosen experts of a token
"""

import triton
import triton.language as tl

from clearhead.backends.cuda.triton_products import gelu, gelu_tanh, silu


@triton.jit
def choose_experts(
    chosen, weights, logits, epsilon, scale,
    E: tl.constexpr, BLOCK_E: tl.constexpr, CHOSEN: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """Choose the CHOSEN experts with the largest logits (T, E) float32 of one token, and compute their weights.

    RENORMALIZE: divide them by their sum + epsilon.
    """
    token, e = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_E)
    z = tl.load(logits + token * E + e, e < E, float("-inf"))
    scores = 1 / (1 + tl.exp(-z)) if SIGMOID else tl.exp(z - tl.max(z, 0))
    if not SIGMOID:
        scores /= tl.sum(scores, 0)
    left, total = z, tl.full((), 0.0, tl.float32)
    for _ in tl.static_range(CHOSEN):
        best = tl.min(tl.where(left == tl.max(left, 0), e, BLOCK_E), 0)
        total += tl.sum(tl.where(e == best, scores, 0.0), 0)
        left = tl.where(e == best, float("-inf"), left)
    factor = scale / (total + epsilon) if RENORMALIZE else scale
    left = z
    for choice in tl.static_range(CHOSEN):
        best = tl.min(tl.where(left == tl.max(left, 0), e, BLOCK_E), 0)
        weight = tl.sum(tl.where(e == best, scores, 0.0), 0) * factor
        tl.store(chosen + token * CHOSEN + choice, best.to(tl.int64))
        tl.store(weights + token * CHOSEN + choice, weight.to(weights.dtype.element_ty))
        left = tl.where(e == best, float("-inf"), left)


@triton.jit
def open_experts(
    inner, x, gate, up, chosen, weights,
    F: tl.constexpr, D: tl.constexpr, CHOSEN: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    WEIGH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute inner (T · CHOSEN, F) from x (T, D) and gate, up (E, F, D). WEIGH: the weights multiply x."""
    pair = tl.program_id(0)
    n, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    expert = tl.load(chosen + pair).to(tl.int64)
    rows = expert * F * D + n[:, None].to(tl.int64) * D + k[None, :]
    sums, gates = tl.zeros((BLOCK_N, BLOCK_K), tl.float32), tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    factor = tl.load(weights + pair).to(tl.float32) if WEIGH else 1.0
    for start in tl.static_range(0, D, BLOCK_K):
        inside = (n < F)[:, None] & (start + k < D)[None, :]
        values = tl.load(x + pair // CHOSEN * D + start + k, start + k < D, 0.0).to(tl.float32) * factor
        sums += tl.load(up + rows + start, inside, 0.0, eviction_policy="evict_first").to(tl.float32) * values[None, :]
        if GATED:
            part = tl.load(gate + rows + start, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
            gates += part * values[None, :]
    result = tl.sum(sums, 1)
    activated = tl.sum(gates, 1) if GATED else result
    if ACTIVATION == "silu":
        activated = silu(activated)
    if ACTIVATION == "gelu":
        activated = gelu(activated)
    if ACTIVATION == "gelu_tanh":
        activated = gelu_tanh(activated)
    if ACTIVATION == "relu":
        activated = tl.maximum(activated, 0.0)
    result = activated * result if GATED else activated
    tl.store(inner + pair.to(tl.int64) * F + n, result.to(inner.dtype.element_ty), n < F)


@triton.jit
def close_experts(
    y, inner, down, chosen, weights,
    F: tl.constexpr, D: tl.constexpr, CHOSEN: tl.constexpr, WEIGH: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute y (T, D) from inner (T · CHOSEN, F) and down (E, D, F). WEIGH: the weights multiply the results."""
    token = tl.program_id(0)
    n, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for choice in tl.static_range(CHOSEN):
        pair = token * CHOSEN + choice
        rows = tl.load(chosen + pair).to(tl.int64) * D * F + n[:, None].to(tl.int64) * F + k[None, :]
        sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for start in tl.static_range(0, F, BLOCK_K):
            inside = (n < D)[:, None] & (start + k < F)[None, :]
            values = tl.load(inner + pair * F + start + k, start + k < F, 0.0).to(tl.float32)
            part = tl.load(down + rows + start, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
            sums += part * values[None, :]
        total += tl.sum(sums, 1) * (tl.load(weights + pair).to(tl.float32) if WEIGH else 1.0)
    tl.store(y + token.to(tl.int64) * D + n, total.to(y.dtype.element_ty), n < D)
