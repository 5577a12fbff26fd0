"""Attention of whole prompts in the C++ kernels against `reference_attention`."""

import pytest
import torch

from clearhead.backends.cpu_kernels.attention import cpu_attention, kernel_accepts
from clearhead.model import Mask, Scoring, reference_attention

pytestmark = pytest.mark.usefixtures("kernels")


def random_inputs(length, num_slots, heads=6, kv_heads=2, width=20, dtype=torch.float32):
    torch.manual_seed(length)
    q = torch.randn(2, heads, length, width)
    k, v = torch.randn(2, 2, kv_heads, num_slots, width)
    return q.to(dtype), k.to(dtype), v.to(dtype)


@torch.no_grad()
def assert_equals_reference(q, k, v, mask):
    scoring = Scoring(mask=mask, scale=0.3)
    assert kernel_accepts(q, k, v, scoring)
    expected = reference_attention(q.float(), k.float(), v.float(), scoring)
    found = cpu_attention(q, k, v, scoring)
    assert found.dtype == q.dtype
    tolerance = 1e-5 if q.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("length", [*range(1, 9), 31, 32, 33, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal_attention(length, dtype):
    assert_equals_reference(*random_inputs(length, length, dtype=dtype), Mask(causal=True))


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 8), (9, 3, 64), (2, 1, 33)])
@pytest.mark.parametrize("num_slots", [5, 40])
def test_attention_to_all_slots_with_different_head_sizes(heads, kv_heads, width, num_slots):
    assert_equals_reference(*random_inputs(13, num_slots, heads, kv_heads, width), Mask())


@pytest.mark.parametrize("batch", [1, 2])
def test_masks_for_all_sequences_or_for_each(batch):
    allowed = torch.rand(batch, 1, 13, 40, generator=torch.Generator().manual_seed(0)) > 0.5
    allowed[:, :, 3] = False  # a token that attends to nothing
    allowed[:, :, 5, 20:] = False
    assert_equals_reference(*random_inputs(13, 40), Mask(allowed))


def test_keys_and_values_may_be_views_of_longer_buffers():
    q, k, v = random_inputs(9, 50)
    assert_equals_reference(q, k[:, :, :9], v[:, :, :9], Mask(causal=True))
    assert_equals_reference(q, k[:, :, :9], v[:, :, :9].contiguous(), Mask(causal=True))


def test_calls_that_the_kernel_does_not_accept_run_in_pytorch():
    q, k, v = random_inputs(9, 9)
    scoring = Scoring(mask=Mask(causal=True), scale=0.3)
    assert not kernel_accepts(q, k, v, scoring)  # gradients are enabled
    q.requires_grad_()
    assert cpu_attention(q, k, v, scoring).requires_grad
    with torch.no_grad():
        capped = Scoring(mask=Mask(causal=True), scale=0.3, softcap=2.0)
        torch.testing.assert_close(cpu_attention(q, k, v, capped), reference_attention(q, k, v, capped))
        assert not kernel_accepts(q, k, v[..., :8], scoring)
        for fewer in ((k[:, :, :5], v[:, :, :5]), (k[:1], v[:1])):
            assert not kernel_accepts(q, *fewer, scoring)
            torch.testing.assert_close(cpu_attention(q, *fewer, scoring), reference_attention(q, *fewer, scoring))
