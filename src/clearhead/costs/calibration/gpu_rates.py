"""Rates that matter on a GPU only: kernels that are slower than their size says, and the kernels of a CUDA graph.

    measure_uneven("cuda", "bfloat16")["n"]; measure_row_products("bfloat16")

The first part measures PyTorch kernels: matrices with unaligned rows, scattered operands, reductions. The second part
measures the Triton kernels of a decode step, which simulation/cuda_graph.py records. There, matrices and caches come in
turn from more memory than the GPU's own cache holds, as in a network.
"""

import itertools
import statistics
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from clearhead.backends import GraphDecoder, NormModule, Projection, fused_linear
from clearhead.costs.calibration.rates import Rate
from clearhead.costs.calibration.timing import Run, collect_points, time_runs
from clearhead.costs.calibration.toy_networks import NORM, toy_decoder
from clearhead.costs.simulation import KernelCounter, choose_greedily
from clearhead.model import RmsNormLayer, Transformer

# --- PyTorch kernels

HEAD_SIZES = 4096, 32769, 2048  # tokens, vocabulary and width of a logit head; an odd vocabulary
NUM_ROWS, WIDTHS = 1 << 14, (512, 1024, 2048, 4096)
HEADS_SHAPE = 8, 1 << 13, 32, 128  # copies, T, N, H


def measure_uneven(device: str, dtype: str) -> dict[str, float]:
    """Return the FLOPs per second of a head whose rows of V logits are unaligned: its forward and two backwards."""
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

    def rate(axis: str) -> tuple[str, float]:
        return axis, flops / time_runs([runs[axis]], device, flops=flops)

    return dict(collect_points(partial(rate, axis) for axis in runs))


def measure_scattered(device: str) -> float:
    """Return the elements per second of half of each head times a vector per token, as in a rotation (book B2)."""
    halves = torch.ones(HEADS_SHAPE, device=device, dtype=torch.bfloat16)[..., : HEADS_SHAPE[-1] // 2]
    targets = torch.empty(halves.shape, device=device, dtype=halves.dtype)
    factor = halves[0, :, :1].clone()
    pairs = zip(halves, targets, strict=True)
    seconds = time_runs([partial(torch.mul, half, factor, out=target) for half, target in pairs], device)
    return targets[0].numel() / seconds


def measure_argmax(device: str) -> float:
    """Return the elements per second of the argmax of one row; more rows in parallel take no longer."""
    row = torch.randn(1, HEAD_SIZES[1], device=device)
    return row.numel() / time_runs([partial(torch.argmax, row, -1)], device)


def measure_reductions(device: str) -> dict[str, list[Rate]]:
    """Return the bytes per second, as KernelCounter counts them, of the kernels of loss, norms and sums, by name."""
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
    for width in WIDTHS:  # with few columns, sums over the rows occupy few multiprocessors
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
    rates: dict[str, list[Rate]] = {}
    for name, rate in collect_points(partial(_measure_reduction, run, device) for run in runs):
        rates.setdefault(name, []).append(rate)
    return rates


def _measure_reduction(run: Run, device: str) -> tuple[str, Rate]:
    with KernelCounter() as counter:
        run()
    kernel = counter.kernels[0]
    return kernel.name, Rate((kernel.width,), counter.num_bytes / time_runs([run], device))


# --- kernels of a decode step in a CUDA graph

_INPUTS = (512, 1024, 2048, 4096, 8192, 16384)
OUTPUTS = (512, 1024, 4096, 16384, 65536)  # rows of W; gate and up count together
MAX_COPIES, _NUM_REPLAYS, _NUM_REPEATS = 200, 100, 9
COLD_BYTES = 1 << 30
# Up to 16 sequences of 8 heads, several programs share a head (`attention_workspace`); beyond, each has its own.
BATCHES, LENGTHS, HEAD_WIDTHS = (1, 8, 16, 32, 64), (512, 2048, 8192), (64, 128)
_NUM_HEADS, _NUM_KV_HEADS = 32, 8
_PRECEDING_WIDTH = 4096  # width of the product before attention: two of its matrices exceed the GPU's cache


def measure_row_products(dtype: str) -> list[Rate]:
    """Measure the product of one row with one matrix, or with gate and up together."""
    pool = torch.randn(OUTPUTS[-1] * _INPUTS[-1], device="cuda", dtype=getattr(torch, dtype))
    shapes = itertools.product((1, 2), OUTPUTS, _INPUTS)
    return collect_points(partial(_measure_row_product, pool, *shape) for shape in shapes)


def _measure_row_product(pool: Tensor, num_matrices: int, outputs: int, inputs: int) -> Rate:
    size = outputs * inputs
    matrices = pool[: pool.numel() // size * size].view(-1, outputs, inputs)
    x = torch.randn(1, inputs, device=pool.device, dtype=pool.dtype)
    norm, gated = RmsNormLayer(NORM, inputs).to(x), num_matrices == 2
    multiply = partial(fused_linear, norm=norm, gated=gated, activation="silu" if gated else "")
    runs: list[Run] = [partial(multiply, x, Projection(matrix, None)) for matrix in matrices[:MAX_COPIES]]
    return Rate((num_matrices, outputs, inputs), 2 * size / time_runs(runs, "cuda"))


def measure_graph_start() -> float:
    """Return what a graph takes beyond its kernels: a graph of one kernel less the time per kernel of eleven."""
    one, eleven = (_replay_seconds(num_kernels) for num_kernels in (1, 11))
    return max(0.0, one - (eleven - one) / 10)


def _replay_seconds(num_kernels: int) -> float:
    tiny, large = torch.ones(8, device="cuda"), torch.empty(COLD_BYTES, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_kernels):
            tiny.add_(1.0)
    rounds = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(10):
            large.fill_(0)  # keeps the GPU busy until the host has queued all replays
        start.record()
        for _ in range(_NUM_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        rounds.append(start.elapsed_time(end) / 1e3 / _NUM_REPLAYS)
    return statistics.median(rounds)


def measure_moments(dtype: str) -> list[Rate]:
    """Return the bytes of x per second, read twice: what a layer norm in a product takes beyond an RMS norm."""
    return collect_points(partial(_measure_moments_point, dtype, width) for width in _INPUTS[::2])


def _measure_moments_point(dtype: str, width: int) -> Rate:
    x = torch.randn(1, width, device="cuda", dtype=getattr(torch, dtype))
    matrices = [Projection(torch.randn(width, width, device="cuda", dtype=x.dtype), None) for _ in range(8)]

    def seconds(norm: NormModule) -> float:
        return time_runs([partial(fused_linear, x, matrix, norm=norm.to(x)) for matrix in matrices], "cuda")

    differences = [seconds(nn.LayerNorm(width)) - seconds(RmsNormLayer(NORM, width)) for _ in range(_NUM_REPEATS)]
    return Rate((width,), 2 * x.nbytes / max(statistics.median(differences), 1e-9))


def measure_row_attention(dtype: str) -> list[Rate]:
    """Return the bytes of keys and values per second at (sequences · key-value heads, keys, head width)."""
    shapes = itertools.product(BATCHES, LENGTHS, HEAD_WIDTHS)
    return collect_points(partial(_measure_row_attention_point, dtype, *shape) for shape in shapes)


def _measure_row_attention_point(dtype: str, batch: int, length: int, width: int) -> Rate:
    num_bytes = 2 * batch * _NUM_KV_HEADS * length * width * getattr(torch, dtype).itemsize
    num_layers = max(1, min(32, COLD_BYTES // num_bytes))
    decoder = _attention_decoder(batch, length, width, dtype, num_layers)
    return Rate((batch * _NUM_KV_HEADS, length, width), num_bytes / _row_attention_seconds(decoder))


def _attention_decoder(batch: int, length: int, width: int, dtype: str, num_layers: int) -> GraphDecoder:
    """Return a decoder with caches of this shape and tiny weights."""
    config = toy_decoder(
        width=16,
        inner_width=16,
        num_heads=_NUM_HEADS,
        num_kv_heads=_NUM_KV_HEADS,
        head_width=width,
        num_layers=num_layers,
        context=length,
    )
    with torch.device("cuda"):
        network = Transformer(config)
    decoder = GraphDecoder(network.to(getattr(torch, dtype)).eval(), batch, length, choose_greedily)
    decoder.position.fill_(length - 1)
    return decoder


def _row_attention_seconds(decoder: GraphDecoder) -> float:
    """Return what attention adds to the product before it, as in a network.

    After another attention, the attention of one sequence is a quarter faster.
    """
    batch, num_kv_heads, _, width = decoder.layers[0].keys.shape
    projected = torch.randn(batch, (_NUM_HEADS + 2 * num_kv_heads) * width, device="cuda", dtype=decoder.dtype)
    attends: list[Run] = [partial(decoder.attend, layer, projected) for layer in decoder.layers]
    matrices = torch.randn(8, _PRECEDING_WIDTH, _PRECEDING_WIDTH, device="cuda", dtype=decoder.dtype)
    x = torch.randn(batch, _PRECEDING_WIDTH, device="cuda", dtype=decoder.dtype)
    products: list[Run] = [
        partial(fused_linear, x, Projection(one, None)) if batch == 1 else partial(linear, x, one) for one in matrices
    ]

    def product_and_attention(number: int) -> None:
        products[number % len(products)]()
        attends[number]()

    pairs: list[Run] = [partial(product_and_attention, number) for number in range(len(attends))]
    return max(time_runs(pairs, "cuda") - time_runs(products, "cuda"), 1e-9)
