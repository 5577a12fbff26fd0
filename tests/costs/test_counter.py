"""The counter against torch's own where that one sees, and against arithmetic where it does not."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from clearhead.costs.simulation.counter import Counter


@pytest.mark.parametrize("layer", [nn.Linear(16, 7), nn.GRUCell(16, 5), nn.Linear(16, 3, bias=False)])
def test_layers_agree_with_torch(layer):
    x = torch.randn(3, 16, requires_grad=True)
    with Counter() as ours, FlopCounterMode(display=False) as theirs:
        layer(x).sum().backward()
    assert ours.flops == theirs.get_total_flops() > 0


def test_a_whole_torch_layer_agrees_with_torch():
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 6, 16)
    explicit_mask = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)  # torch's counter sees no other
    with explicit_mask, Counter() as ours, FlopCounterMode(display=False) as theirs:
        layer(x).sum().backward()
    assert ours.flops == theirs.get_total_flops() > 0


def attention_flops(mask=None, causal=False, backward=False):
    q, k, v = (torch.randn(2, 3, 5, 4, requires_grad=backward) for _ in range(3))
    with Counter() as counter:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        if backward:
            out.sum().backward()
    return counter


def test_fused_attention_on_the_cpu():
    """2 products of 2·T·S·H for each of 2·3 heads; causal allows 15 of 25 pairs; a backward makes 5 products."""
    whole = 2 * 2 * 3 * 2 * 5 * 5 * 4
    counter = attention_flops(causal=True)
    assert any("flash_attention_for_cpu" in kernel.name for kernel in counter.kernels)
    assert counter.flops == whole
    assert counter.allowed_flops == whole * 15 // 25
    assert attention_flops(causal=True, backward=True).flops == whole + whole * 5 // 2


def test_a_mask_says_what_is_allowed():
    window = torch.ones(5, 5, dtype=torch.bool).tril().triu(-1)
    counter = attention_flops(mask=window)
    assert counter.allowed_flops * 25 == counter.flops * int(window.sum())


def test_views_cost_nothing_and_tables_are_not_read_whole():
    table, row = torch.randn(1000, 8), torch.tensor([3, 4])
    with Counter() as counter:
        table.t().view(8, 1000)[:, :5]
        nn.functional.embedding(row, table)
    assert counter.num_bytes == 2 * 2 * 8 * 4
    assert len(counter.kernels) == 1
    assert counter.num_dispatches > 1


def test_rows_that_begin_between_aligned_places():
    """A head of 7 words in float32: its logits are uneven, on another side of each product of the backward."""
    head, x = nn.Linear(16, 7, bias=False), torch.randn(12, 16, requires_grad=True)
    with Counter() as counter:
        head(x).backward(torch.ones(12, 7))
    found = {kernel.shape[1:]: kernel.uneven for kernel in counter.kernels if kernel.shape}
    assert found == {(12, 7, 16): "n", (12, 16, 7): "k", (7, 16, 12): "m"}
    with Counter() as counter:
        nn.Linear(16, 8)(torch.randn(7, 16))
        nn.Linear(16, 7)(torch.randn(1, 16))
    assert {kernel.uneven for kernel in counter.kernels} == {""}


def test_operands_that_lie_differently():
    x, row = torch.randn(4, 6), torch.randn(6)
    with Counter() as counter:
        x * x + 1.0
        x.to(torch.bfloat16)
        x * row
        x[:, :3] * x[:, 3:]
        x.t().contiguous()
    assert [kernel.num_scattered for kernel in counter.kernels] == [0, 0, 0, 24, 12, 24]
    assert [kernel.num_dispatches for kernel in counter.kernels[:3]] == [1, 2, 3]


def test_memory_comes_and_goes():
    with Counter() as counter:
        first = torch.ones(1000)
        second = first * 2
        del first
        third = second + 1
        del second, third
    assert counter.peak_bytes == 8000
    assert counter.live_bytes == 0


def test_saved_for_the_backward():
    """exp keeps its result; that and the sum are alive when the backward begins."""
    x = torch.randn(1000, requires_grad=True)
    with Counter() as counter:
        x.exp().sum().backward()
    assert counter.saved_bytes is not None
    assert 4000 <= counter.saved_bytes <= 4016
