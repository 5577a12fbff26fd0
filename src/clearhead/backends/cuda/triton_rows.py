"""Triton kernels between the products of many rows: one pass over the hidden states instead of one per operation.

normalize_rows[grid](...)     x += branch; y = norm(x)
activate_rows[grid](...)      y = activation(gate) · up
"""

import triton
import triton.language as tl

from clearhead.backends.cuda.triton_products import gelu, gelu_tanh, silu


@triton.jit
def normalize_rows(
    y, x, branch, gain, shift, epsilon,
    D: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr, UNIT_OFFSET: tl.constexpr, BIAS: tl.constexpr,
    ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add row r of `branch` to that of x if ADD, and store the norm of x (rows, D) in y."""
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    place = tl.program_id(0).to(tl.int64) * D + d
    scale = tl.load(gain + d, inside, 0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + place, inside, 0.0)
    if ADD:
        values = (values.to(tl.float32) + tl.load(branch + place, inside, 0.0).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + place, values, inside)
    values = values.to(tl.float32)
    if KIND == "layer":
        values = tl.where(inside, values - tl.sum(values) / D, 0.0)
    values *= tl.rsqrt(tl.sum(values * values) / D + epsilon)
    values *= scale + 1 if UNIT_OFFSET else scale
    if BIAS:
        values += tl.load(shift + d, inside, 0.0).to(tl.float32)
    tl.store(y + place, values.to(y.dtype.element_ty), inside)


@triton.jit
def activate_rows(
    y, inner, F: tl.constexpr, BLOCK_F: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr
):
    """Store activation(inner), or with GATED activation(gate) · up, where the gate is the first half of a row."""
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    WIDTH: tl.constexpr = 2 * F if GATED else F
    values = tl.load(inner + row * WIDTH + f, f < F, 0.0).to(tl.float32)
    if ACTIVATION == "silu":
        values = silu(values)
    if ACTIVATION == "gelu":
        values = gelu(values)
    if ACTIVATION == "gelu_tanh":
        values = gelu_tanh(values)
    if ACTIVATION == "relu":
        values = tl.maximum(values, 0.0)
    if GATED:
        values *= tl.load(inner + row * WIDTH + F + f, f < F, 0.0).to(tl.float32)
    tl.store(y + row * F + f, values.to(y.dtype.element_ty), f < F)
