"""How fast the Triton kernels of a decoded token are here, by shape: what costs/simulation/graphed.py lays out, run on a GPU.

    products = measure_row_products("bfloat16"); attention = measure_row_attention("bfloat16")

Matrices and caches are taken in turn from more memory than the GPU's own cache holds, as in a network.
"""

import itertools
import statistics
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.architecture import (
    Embedding,
    FeedForward,
    GroupedAttention,
    Head,
    Layer,
    ModelConfig,
    RmsNorm,
    Rope,
    Stack,
)
from clearhead.backends import GraphDecoder, Matrix, Norm, multiply
from clearhead.costs.calibration.calibration import Rate
from clearhead.costs.calibration.clock import Run, measured, seconds_of
from clearhead.costs.simulation.workload_steps import greedy
from clearhead.model import RootMeanSquare, Transformer

INPUTS = (512, 1024, 2048, 4096, 8192, 16384)
OUTPUTS = (512, 1024, 4096, 16384, 65536)  # of both matrices together where there are two
MOST_COPIES, NUM_REPLAYS, NUM_TURNS = 200, 100, 9
COLD_BYTES = 1 << 30
# Up to 16 rows of 8 heads several programs share a head (`attention_workspace`), from there on each has its own.
BATCHES, LENGTHS, HEAD_WIDTHS = (1, 8, 16, 32, 64), (512, 2048, 8192), (64, 128)
NUM_HEADS, NUM_KV_HEADS = 32, 8
BEFORE_WIDTH = 4096  # of a product before attention: two of its matrices are more than the GPU's cache holds
NORM = RmsNorm(epsilon=1e-5)


def measure_row_products(dtype: str) -> list[Rate]:
    """One row times one matrix, or times gate and up together."""
    kind = getattr(torch, dtype)
    pool = torch.randn(OUTPUTS[-1] * INPUTS[-1], device="cuda", dtype=kind)
    shapes = itertools.product((1, 2), OUTPUTS, INPUTS)
    return measured(partial(measure_row_product, pool, *shape) for shape in shapes)


def measure_row_product(pool: Tensor, count: int, outputs: int, inputs: int) -> Rate:
    size = outputs * inputs
    matrices = pool[: pool.numel() // size * size].view(-1, outputs, inputs)
    x = torch.randn(1, inputs, device=pool.device, dtype=pool.dtype)
    norm = RootMeanSquare(NORM, inputs).to(x)
    run = partial(multiply, x, norm=norm, gated=count == 2, activation="silu" if count == 2 else "")
    runs: list[Run] = [partial(run, matrix=Matrix(one, None)) for one in matrices[:MOST_COPIES]]
    return Rate((count, outputs, inputs), 2 * size / seconds_of(runs, "cuda"))


def measure_start() -> float:
    """What a graph takes beyond its kernels: one of one kernel, less what each of eleven takes."""
    one, eleven = (replay_seconds(num_kernels) for num_kernels in (1, 11))
    return max(0.0, one - (eleven - one) / 10)


def replay_seconds(num_kernels: int) -> float:
    tiny, large = torch.ones(8, device="cuda"), torch.empty(COLD_BYTES, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_kernels):
            tiny.add_(1.0)
    rounds = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(10):
            large.fill_(0)  # keeps the GPU at work until the host has asked for all replays
        begin.record()
        for _ in range(NUM_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) / 1e3 / NUM_REPLAYS)
    return statistics.median(rounds)


def measure_moments(dtype: str) -> list[Rate]:
    """Bytes of x per second, of two looks at it: what a layer norm in a product takes beyond an RMS norm."""
    return measured(partial(measure_two_looks, dtype, width) for width in INPUTS[::2])


def measure_two_looks(dtype: str, width: int) -> Rate:
    x = torch.randn(1, width, device="cuda", dtype=getattr(torch, dtype))
    matrices = [Matrix(torch.randn(width, width, device="cuda", dtype=x.dtype), None) for _ in range(8)]

    def seconds(norm: Norm) -> float:
        return seconds_of([partial(multiply, x, matrix, norm=norm.to(x)) for matrix in matrices], "cuda")

    turns = [seconds(nn.LayerNorm(width)) - seconds(RootMeanSquare(NORM, width)) for _ in range(NUM_TURNS)]
    return Rate((width,), 2 * x.nbytes / max(statistics.median(turns), 1e-9))


def measure_row_attention(dtype: str) -> list[Rate]:
    """Bytes of keys and values per second, of (rows · key-value heads, keys, head width)."""
    shapes = itertools.product(BATCHES, LENGTHS, HEAD_WIDTHS)
    return measured(partial(measure_attending, dtype, *shape) for shape in shapes)


def measure_attending(dtype: str, batch: int, length: int, width: int) -> Rate:
    num_bytes = 2 * batch * NUM_KV_HEADS * length * width * getattr(torch, dtype).itemsize
    decoder = attending(batch, length, width, dtype, num_layers=max(1, min(32, COLD_BYTES // num_bytes)))
    return Rate((batch * NUM_KV_HEADS, length, width), num_bytes / attending_seconds(decoder))


def attending(batch: int, length: int, width: int, dtype: str, num_layers: int) -> GraphDecoder:
    """A decoder with caches of this shape, and hardly anything else."""
    attention = GroupedAttention(num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_width=width, position=Rope())
    inner = FeedForward(width=16, activation="silu", gated=True)
    layer = Layer(attention=attention, feed_forward=inner, norm=NORM)
    stack = Stack(embedding=Embedding(vocab_size=16), layers=(layer,) * num_layers, final_norm=NORM)
    with torch.device("cuda"):
        network = Transformer(ModelConfig(width=16, context=length, decoder=stack, head=Head()))
    decoder = GraphDecoder(network.to(getattr(torch, dtype)).eval(), batch, length, greedy)
    decoder.position.fill_(length - 1)
    return decoder


def attending_seconds(decoder: GraphDecoder) -> float:
    """What it adds to a product before it, as in a network: after itself attention of one row is a quarter faster."""
    batch, kv_heads, _, width = decoder.layers[0].keys.shape
    projected = torch.randn(batch, (NUM_HEADS + 2 * kv_heads) * width, device="cuda", dtype=decoder.dtype)
    attends: list[Run] = [partial(decoder.attend, layer, projected) for layer in decoder.layers]
    matrices = torch.randn(8, BEFORE_WIDTH, BEFORE_WIDTH, device="cuda", dtype=decoder.dtype)
    x = torch.randn(batch, BEFORE_WIDTH, device="cuda", dtype=decoder.dtype)
    products: list[Run] = [
        partial(multiply, x, Matrix(one, None)) if batch == 1 else partial(functional.linear, x, one)
        for one in matrices
    ]

    def one_after_the_other(number: int) -> None:
        products[number % len(products)]()
        attends[number]()

    both: list[Run] = [partial(one_after_the_other, number) for number in range(len(attends))]
    return max(seconds_of(both, "cuda") - seconds_of(products, "cuda"), 1e-9)
