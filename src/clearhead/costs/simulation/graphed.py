"""The kernels of a decoded token in the CUDA graph of backends/cuda/decoder.py, on the meta device.

    counter = lay_out_graph(workload); print(len(counter.kernels))

Nothing launches a Triton kernel there, so each is told to the counter by the sizes of its operands.
"""

import math

import torch
from torch import Tensor, nn

from clearhead.architecture import SlidingWindow
from clearhead.backends import GraphDecoder, Matrix, Norm, StaticLayer
from clearhead.costs.formulas.workload import Workload
from clearhead.costs.simulation.counter import Counter, Kernel, size_of
from clearhead.costs.simulation.workload_steps import build, greedy
from clearhead.model import Transformer


def lay_out_graph(workload: Workload) -> Counter:
    """Its memory begins with what the decoder holds beside the weights."""
    counter = Counter()
    counter.in_graph = True
    decoder = Told(build(workload, "meta"), workload, counter)
    counter.live_bytes = decoder.num_bytes
    with torch.no_grad(), counter:
        decoder.advance()
    return counter


class Told(GraphDecoder):
    """A decoder whose Triton kernels are told to the counter; what several rows run in PyTorch the counter sees."""

    def __init__(self, network: Transformer, workload: Workload, counter: Counter):
        super().__init__(network, workload.batch, workload.context, greedy)
        self.counter = counter

    def multiply(
        self,
        x: Tensor,
        matrix: Matrix,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        gated: bool = False,
        activation: str = "",
    ) -> Tensor:
        count = 2 if gated else 1
        outputs, inputs = matrix.shape
        y = x.new_empty(len(x), outputs // count) if residual is None else residual
        vectors = [x, y, matrix.bias, residual, *(() if norm is None else norm.parameters())]
        num_bytes = matrix.num_bytes + sum(size_of(vector) for vector in vectors if vector is not None)
        shape = count, len(x), outputs // count, inputs
        self.counter.kernels.append(Kernel("multiply_row", num_bytes, 2 * math.prod(shape), shape))
        if isinstance(norm, nn.LayerNorm):  # looks at x twice more, for its mean and its deviation
            self.counter.kernels.append(Kernel("moments", 2 * size_of(x), width=inputs))
        return y

    def attend(self, layer: StaticLayer, projected: Tensor) -> Tensor:
        batch, kv_heads, length, width = layer.keys.shape
        num_heads, pattern = layer.attention.config.num_heads, layer.attention.config.pattern
        length = min(length, pattern.size) if isinstance(pattern, SlidingWindow) else length
        num_bytes = 2 * batch * kv_heads * length * width * layer.keys.element_size()
        flops = 4 * batch * num_heads * length * width
        self.counter.kernels.append(Kernel("attend_row", num_bytes, flops, attention=(batch * kv_heads, length, width)))
        return projected.new_empty(batch, num_heads * width)
