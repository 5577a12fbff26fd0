"""Attention over a whole prompt in the CPU kernels: a replacement for `fused_attention`, twice as fast on few cores.

output = cpu_attention(q, k, v, Scoring(mask=Mask(causal=True), scale=0.125))
"""

from ctypes import byref

import torch
from torch import Tensor

from clearhead.backends.cpu_kernels.library import is_inference, load_kernel_library
from clearhead.backends.cpu_kernels.structures import Heads, KeyValueView
from clearhead.model import Scoring, fused_attention


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Compute attention of q (B, N, T, H) over k, v (B, K, S, H) -> (B, N, T, H).

    `fused_attention` computes what the kernel does not accept.
    """
    kernels = load_kernel_library()
    if kernels is None or not kernel_accepts(q, k, v, scoring):
        return fused_attention(q, k, v, scoring)
    batch, num_heads, length, width = q.shape
    num_kv_heads, num_slots = k.shape[1:3]
    if k.stride() != v.stride() or k.stride(3) != 1:
        k, v = k.contiguous(), v.contiguous()
    allowed = scoring.mask.allowed
    mask = None if allowed is None else allowed.expand(batch, 1, length, num_slots).contiguous()
    queries = q.transpose(1, 2).float().contiguous()
    y = torch.empty_like(queries)
    heads = Heads(num_heads, num_kv_heads, width, scale=scoring.scale)
    view = KeyValueView(num_slots=num_slots, allowed=0 if mask is None else mask.data_ptr())
    view.point_to(k, v)
    attends_to_all = not scoring.mask.causal
    kernels.clearhead_attend_prompt(
        y.data_ptr(), queries.data_ptr(), batch, length, byref(heads), byref(view), attends_to_all
    )
    return y.transpose(1, 2).to(q.dtype)


def kernel_accepts(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> bool:
    """Return whether the kernel computes attention with these tensors and this scoring."""
    if not is_inference() or q.device.type != "cpu":
        return False
    extras = (scoring.softcap, scoring.temperature, scoring.bias, scoring.sinks)
    only_scaled = extras == (None,) * 4 and scoring.dropout == 0.0
    one_dtype = q.dtype == k.dtype == v.dtype and q.dtype in (torch.float32, torch.bfloat16)
    one_mask_for_all_heads = scoring.mask.allowed is None or scoring.mask.allowed.shape[1] == 1
    no_past = not scoring.mask.causal or q.shape[2] == k.shape[2]
    same_batch_and_width = k.shape == v.shape and k.shape[::3] == q.shape[::3]
    return only_scaled and one_dtype and one_mask_for_all_heads and no_past and same_batch_and_width
