"""KernelCounter against torch's own counter for the operations that torch counts, and against arithmetic for others."""

import pytest
import torch
from torch import nn
from torch.nn.functional import nll_loss, scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from clearhead.costs.simulation.counter import KernelCounter


@pytest.mark.parametrize("layer", [nn.Linear(16, 7), nn.GRUCell(16, 5), nn.Linear(16, 3, bias=False)])
def test_flops_of_single_layers_agree_with_torch(layer):
    """A product of (m, k) and (k, n) takes 2·m·n·k FLOPs (book F1)."""
    x = torch.randn(3, 16, requires_grad=True)
    with KernelCounter() as ours, FlopCounterMode(display=False) as theirs:
        layer(x).sum().backward()
    assert ours.flops == theirs.get_total_flops() > 0


def test_flops_of_a_transformer_layer_agree_with_torch():
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 6, 16)
    unfused = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)  # torch's counter sees no other
    with unfused, KernelCounter() as ours, FlopCounterMode(display=False) as theirs:
        layer(x).sum().backward()
    assert ours.flops == theirs.get_total_flops() > 0


def count_attention(mask=None, causal=False, backward=False):
    q, k, v = (torch.randn(2, 3, 5, 4, requires_grad=backward) for _ in range(3))
    with KernelCounter() as counter:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        if backward:
            out.sum().backward()
    return counter


def test_flops_of_fused_attention_on_the_cpu():
    """2 products of 2·T·S·H for each of 2·3 heads; causal allows 15 of 25 pairs; a backward makes 5 products."""
    all_pairs = 2 * 2 * 3 * 2 * 5 * 5 * 4
    counter = count_attention(causal=True)
    assert any("flash_attention_for_cpu" in kernel.name for kernel in counter.kernels)
    assert counter.flops == all_pairs
    assert counter.allowed_flops == all_pairs * 15 // 25
    assert count_attention(causal=True, backward=True).flops == all_pairs + all_pairs * 5 // 2


def test_allowed_flops_are_those_of_the_mask():
    window = torch.ones(5, 5, dtype=torch.bool).tril().triu(-1)
    counter = count_attention(mask=window)
    assert counter.allowed_flops * 25 == counter.flops * int(window.sum())


def test_views_move_no_bytes_and_an_embedding_reads_only_its_rows():
    table, tokens = torch.randn(1000, 8), torch.tensor([3, 4])
    with KernelCounter() as counter:
        table.t().view(8, 1000)[:, :5]
        nn.functional.embedding(tokens, table)
    assert counter.num_bytes == 2 * 2 * 8 * 4
    assert len(counter.kernels) == 1
    assert counter.num_dispatches > 1


def test_the_loss_reads_one_number_per_row_and_its_backward_none():
    """2 rows of 1,000 log-probabilities; the backward writes all of their gradients."""
    logits = torch.randn(2, 1000, requires_grad=True)
    with KernelCounter() as counter:
        nll_loss(logits, torch.zeros(2, dtype=torch.int64), reduction="sum").backward()
    moved = {kernel.name: kernel.num_bytes for kernel in counter.kernels}
    assert moved["nll_loss_forward"] == 2 * 8 + 2 * 4 + 2 * 4  # targets, numbers, the loss and the sum of weights
    assert moved["nll_loss_backward"] == 4 + 2 * 8 + 4 + 2 * 1000 * 4


def test_products_with_unaligned_rows_have_uneven_axes():
    """Logits of a head of 7 words in float32 are unaligned: another axis in each product of the backward."""
    head, x = nn.Linear(16, 7, bias=False), torch.randn(12, 16, requires_grad=True)
    with KernelCounter() as counter:
        head(x).backward(torch.ones(12, 7))
    axes = {kernel.shape[1:]: kernel.uneven_axes for kernel in counter.kernels if kernel.shape}
    assert axes == {(12, 7, 16): "n", (12, 16, 7): "k", (7, 16, 12): "m"}
    with KernelCounter() as counter:
        nn.Linear(16, 8)(torch.randn(7, 16))
        nn.Linear(16, 7)(torch.randn(1, 16))
    assert {kernel.uneven_axes for kernel in counter.kernels} == {""}


def test_operands_of_different_layouts_are_scattered():
    x, row = torch.randn(4, 6), torch.randn(6)
    with KernelCounter() as counter:
        x * x + 1.0
        x.to(torch.bfloat16)
        x * row
        x[:, :3] * x[:, 3:]
        x.t().contiguous()
    assert [kernel.num_scattered for kernel in counter.kernels] == [0, 0, 0, 24, 12, 24]
    assert [kernel.num_dispatches for kernel in counter.kernels[:3]] == [1, 2, 3]


def test_peak_memory_counts_live_tensors_only():
    with KernelCounter() as counter:
        first = torch.ones(1000)
        second = first * 2
        del first
        third = second + 1
        del second, third
    assert counter.peak_bytes == 8000
    assert counter.live_bytes == 0


def test_saved_bytes_are_those_alive_when_the_backward_starts():
    """Autograd saves the result of exp; that and the sum are alive when the backward starts."""
    x = torch.randn(1000, requires_grad=True)
    with KernelCounter() as counter:
        x.exp().sum().backward()
    assert counter.saved_bytes is not None
    assert 4000 <= counter.saved_bytes <= 4016
