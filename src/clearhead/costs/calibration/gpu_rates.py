"""What slows single kernels down on a GPU, measured there: awkward places in memory, and more than one pass over it.

most = measure_uneven("cuda", "bfloat16"); most["n"]
"""

from functools import partial

import torch
from torch.nn.functional import linear

from clearhead.costs.calibration.calibration import Rate
from clearhead.costs.calibration.clock import Run, measured, seconds_of
from clearhead.costs.simulation.counter import Counter

HEAD_SIZES = 4096, 32769, 2048  # rows, vocabulary, width of a logit head; an odd vocabulary
NUM_ROWS, WIDTHS = 1 << 14, (512, 1024, 2048, 4096)
HEADS_SHAPE = 8, 1 << 13, 32, 128  # copies, T, N, H


def measure_uneven(device: str, dtype: str) -> dict[str, float]:
    """FLOPs per second of a head's forward and the two products of its backward, where rows of V numbers are odd."""
    rows, outputs, inputs = HEAD_SIZES
    x, weight, gradient = (
        torch.randn(shape, device=device, dtype=getattr(torch, dtype))
        for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    runs: dict[str, Run] = {
        "n": partial(linear, x, weight),
        "k": partial(torch.mm, gradient, weight),
        "m": partial(torch.mm, gradient.T, x),
    }
    flops = 2 * rows * outputs * inputs

    def rate(side: str) -> tuple[str, float]:
        return side, flops / seconds_of([runs[side]], device, flops=flops)

    return dict(measured(partial(rate, side) for side in runs))


def measure_scattered(device: str) -> float:
    """Numbers per second of half of each head times a vector of its token, as where heads are turned (book B2)."""
    halves = torch.ones(HEADS_SHAPE, device=device, dtype=torch.bfloat16)[..., : HEADS_SHAPE[-1] // 2]
    targets = torch.empty(halves.shape, device=device, dtype=halves.dtype)
    factor = halves[0, :, :1].clone()
    pairs = zip(halves, targets, strict=True)
    seconds = seconds_of([partial(torch.mul, half, factor, out=target) for half, target in pairs], device)
    return targets[0].numel() / seconds


def measure_choice(device: str) -> float:
    """Numbers per second of one row whose largest is sought; others beside it take no longer."""
    row = torch.randn(1, HEAD_SIZES[1], device=device)
    return row.numel() / seconds_of([partial(torch.argmax, row, -1)], device)


def measure_passes(device: str) -> dict[str, list[Rate]]:
    """Bytes per second, as the counter counts them, of kernels that reduce, by name: the loss, the norms, sums."""
    aten = torch.ops.aten
    logits = torch.randn(HEAD_SIZES[:2], device=device)
    target = torch.zeros(len(logits), dtype=torch.int64, device=device)
    one = torch.ones((), device=device)
    runs: list[Run] = [
        partial(aten._log_softmax, logits, 1, False),
        partial(aten._log_softmax_backward_data, logits, logits, 1, logits.dtype),
        partial(aten.nll_loss_forward, logits, target, None, 1, -100),
        partial(aten.nll_loss_backward, one, logits, target, None, 1, -100, one),
    ]
    for width in WIDTHS:  # of few columns, sums over the rows keep few multiprocessors busy
        x = torch.randn(NUM_ROWS, width, device=device, dtype=torch.bfloat16)
        weight = x[0].clone()
        norm = partial(aten.native_layer_norm, x, [width], weight, weight, 1e-5)
        _, mean, deviation = norm()
        runs += [
            partial(aten.mean, x.float(), [-1], True),
            partial(aten.sum, x, [0]),
            norm,
            partial(aten.native_layer_norm_backward, x, x, [width], mean, deviation, weight, weight, [True] * 3),
        ]
    found: dict[str, list[Rate]] = {}
    for name, rate in measured(partial(rate_of, run, device) for run in runs):
        found.setdefault(name, []).append(rate)
    return found


def rate_of(run: Run, device: str) -> tuple[str, Rate]:
    with Counter() as counter:
        run()
    kernel = counter.kernels[0]
    return kernel.name, Rate((kernel.width,), counter.num_bytes / seconds_of([run], device))
