"""Attention of many tokens in the kernels, against the steps of model/attend.py."""

import pytest
import torch

from clearhead.backends.cpu_kernels.attention import cpu_attention, kernel_accepts
from clearhead.model.attend import Scoring, reference_attention
from clearhead.model.masks import Mask

pytestmark = pytest.mark.usefixtures("kernels")


def drawn(length, num_slots, heads=6, kv_heads=2, width=20, dtype=torch.float32):
    torch.manual_seed(length)
    q = torch.randn(2, heads, length, width)
    k, v = torch.randn(2, 2, kv_heads, num_slots, width)
    return q.to(dtype), k.to(dtype), v.to(dtype)


@torch.no_grad()
def assert_same(q, k, v, mask):
    how = Scoring(mask=mask, scale=0.3)
    assert kernel_accepts(q, k, v, how)
    expected = reference_attention(q.float(), k.float(), v.float(), how)
    found = cpu_attention(q, k, v, how)
    assert found.dtype == q.dtype
    tolerance = 1e-5 if q.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("length", [*range(1, 9), 31, 32, 33, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal(length, dtype):
    assert_same(*drawn(length, length, dtype=dtype), Mask(causal=True))


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 8), (9, 3, 64), (2, 1, 33)])
@pytest.mark.parametrize("num_slots", [5, 40])
def test_any_heads_see_all(heads, kv_heads, width, num_slots):
    assert_same(*drawn(13, num_slots, heads, kv_heads, width), Mask())


@pytest.mark.parametrize("rows", [1, 2])
def test_a_mask_of_each_row(rows):
    allowed = torch.rand(rows, 1, 13, 40, generator=torch.Generator().manual_seed(0)) > 0.5
    allowed[:, :, 3] = False  # sees nothing
    allowed[:, :, 5, 20:] = False
    assert_same(*drawn(13, 40), Mask(allowed))


def test_a_view_of_a_longer_buffer():
    q, k, v = drawn(9, 50)
    assert_same(q, k[:, :, :9], v[:, :, :9], Mask(causal=True))
    assert_same(q, k[:, :, :9], v[:, :, :9].contiguous(), Mask(causal=True))


def test_what_is_not_known_is_computed_elsewhere():
    q, k, v = drawn(9, 9)
    how = Scoring(mask=Mask(causal=True), scale=0.3)
    assert not kernel_accepts(q, k, v, how)  # a gradient may be asked for
    q.requires_grad_()
    assert cpu_attention(q, k, v, how).requires_grad
    with torch.no_grad():
        capped = Scoring(mask=Mask(causal=True), scale=0.3, softcap=2.0)
        torch.testing.assert_close(cpu_attention(q, k, v, capped), reference_attention(q, k, v, capped))
        assert not kernel_accepts(q, k, v[..., :8], how)
        for fewer in ((k[:, :, :5], v[:, :, :5]), (k[:1], v[:1])):
            assert not kernel_accepts(q, *fewer, how)
            torch.testing.assert_close(cpu_attention(q, *fewer, how), reference_attention(q, *fewer, how))
