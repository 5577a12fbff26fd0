"""From the last hidden states to the loss and its gradients in one operation, on an NVIDIA GPU.

    losses = head_loss(head.features(hidden), head.matrix(table), head.bias, targets)

The loss is the end of the road: its gradients are known as soon as it is, but for a factor. They take the place of the
logits, which nobody reads again, and what is kept for the backward is what comes of them, (M, D) and (V, D). So GPT-2's
step is 3 % shorter than with autograd's own, and chunks of tokens compute nothing twice.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from clearhead.backends import triton_runs
from clearhead.data import IGNORED
from clearhead.model import LogitHead
from clearhead.training.loss import Losses

BLOCK, NUM_WARPS = 4096, 4  # the fastest of 19 on an H200, for GPT-2's vocabulary


def suits(network: nn.Module) -> bool:
    """Where Triton runs, a head that ends in its product; float64 would be lost in the kernel."""
    head, weight = getattr(network, "head", None), next(network.parameters())
    plain = type(head) is LogitHead and head.config.softcap is None
    return plain and weight.dtype != torch.float64 and triton_runs(weight.device)


def head_loss(
    hidden: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    smoothing: float = 0.0,
    z_weight: float = 0.0,
    chunk_tokens: int | None = None,
) -> Losses:
    """As loss.cross_entropy of hidden (..., D) times the head's matrix (V, D)."""
    asked = torch.is_grad_enabled()
    total, plain, *_ = lose(
        hidden.flatten(0, -2),
        matrix,
        bias,
        targets.flatten().contiguous(),  # of one column, flattened, is still a view with gaps
        smoothing,
        z_weight,
        chunk_tokens or targets.numel(),
        asked and hidden.requires_grad,
        asked and (matrix.requires_grad or (bias is not None and bias.requires_grad)),
    )
    return Losses(total, plain.detach())


@torch.library.custom_op("clearhead::head_loss", mutates_args=())
def lose(
    hidden: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    smoothing: float,
    z_weight: float,
    chunk_tokens: int,
    of_hidden: bool,
    of_matrix: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The sums of both losses, and the gradients of hidden (M, D), and of matrix (V, D) and bias (V,), where asked."""
    from clearhead.training.triton_loss import lose_rows

    totals, plains = hidden.new_empty(2, len(hidden), dtype=torch.float32)
    of_all, of_rows, of_bias = blank_gradients(hidden, matrix, bias, of_hidden, of_matrix)
    for start in range(0, len(hidden), chunk_tokens):
        part = slice(start, start + chunk_tokens)
        logits = linear(hidden[part], matrix, bias)
        with torch.cuda.device_of(logits):  # Triton launches on the current device
            lose_rows[len(logits),](
                totals[part], plains[part], logits, targets[part], smoothing, z_weight,
                V=len(matrix), IGNORED=IGNORED, SMOOTHED=smoothing > 0, GRADIENT=of_hidden or of_matrix,
                BLOCK=BLOCK, num_warps=NUM_WARPS,
            )  # fmt: skip
        if of_hidden:
            torch.mm(logits, matrix, out=of_all[part])
        if of_matrix:  # summed in float32, where there is more than one
            of_chunk = logits.t() @ hidden[part]
            of_rows = of_chunk if start == 0 else of_rows.float() + of_chunk
        if of_matrix and bias is not None:
            of_bias = of_bias.float() + logits.sum(0, dtype=torch.float32)
    return totals.sum(), plains.sum(), of_all, of_rows.to(matrix.dtype), of_bias.to(matrix.dtype)


def blank_gradients(
    hidden: Tensor, matrix: Tensor, bias: Tensor | None, of_hidden: bool, of_matrix: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(hidden) if of_hidden else hidden.new_empty(0),
        torch.zeros_like(matrix) if of_matrix else hidden.new_empty(0),
        torch.zeros_like(bias) if of_matrix and bias is not None else hidden.new_empty(0),
    )


@lose.register_fake
def _(
    hidden: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    smoothing: float,
    z_weight: float,
    chunk_tokens: int,
    *asked: bool,
) -> tuple[Tensor, ...]:
    sums = (hidden.new_empty((), dtype=torch.float32) for _ in range(2))
    return *sums, *blank_gradients(hidden, matrix, bias, *asked)


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[2:])


def go_back(ctx: Any, total: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
    """In the factor's own precision: rounded to bfloat16, it would be off by up to 1/256 for all of them."""
    asked = [(kept.float() * total).to(kept.dtype) if kept.numel() else None for kept in ctx.saved_tensors]
    return *asked, *(None,) * 6


lose.register_autograd(go_back, setup_context=keep)
