"""How fast the Triton kernels of a decoded token are here, by shape: what cost/graphed.py lays out, run on a GPU.

    products = measure_row_products("bfloat16"); attention = measure_row_attention("bfloat16")

Matrices and caches are taken in turn from more memory than the GPU's own cache holds, as in a network.
"""

import itertools
from functools import partial

import torch
from torch import Tensor

from clearhead.cost.calibration import Rate
from clearhead.cost.clock import Run, measured, seconds_of
from clearhead.cost.running import greedy
from clearhead.fast.cuda import GraphDecoder
from clearhead.fast.launch import Matrix, multiply
from clearhead.model.branches import FeedForward
from clearhead.model.config import Embedding, GroupedAttention, Head, Layer, ModelConfig, Stack
from clearhead.model.norms import RootMeanSquare
from clearhead.model.parts import RmsNorm, Rope
from clearhead.model.transformer import Transformer

INPUTS = (512, 1024, 2048, 4096, 8192, 16384)
OUTPUTS = (512, 1024, 4096, 16384, 65536)  # of both matrices together where there are two
MOST_COPIES = 200
COLD_BYTES = 1 << 30
# Up to 16 rows of 8 heads several programs share a head (`attention_workspace`), from there on each has its own.
BATCHES, LENGTHS, HEAD_WIDTHS = (1, 8, 16, 32, 64), (512, 2048, 8192), (64, 128)
NUM_HEADS, NUM_KV_HEADS = 32, 8
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
    batch, kv_heads, _, width = decoder.layers[0].keys.shape
    projected = torch.randn(batch, (NUM_HEADS + 2 * kv_heads) * width, device="cuda", dtype=decoder.dtype)
    return seconds_of([partial(decoder.attend, layer, projected) for layer in decoder.layers], "cuda")
