"""The kernels of a decoded token in the CUDA graph of fast/cuda.py, on the meta device.

    counter = lay_out_graph(workload); print(len(counter.kernels))

Nothing launches a Triton kernel there, so each is told to the counter by the sizes of its operands.
"""

import torch
from torch import Tensor

from clearhead.cost.counter import Counter, Kernel
from clearhead.cost.running import build, greedy
from clearhead.cost.workload import Workload
from clearhead.fast.cuda import GraphDecoder, StaticLayer
from clearhead.fast.launch import Matrix
from clearhead.model.norms import RootMeanSquare
from clearhead.model.transformer import Transformer


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
        super().__init__(network, workload.rows, workload.context, greedy)
        self.counter = counter

    def by_kernels(self, layer: StaticLayer, x: Tensor) -> None:
        self.multiply(layer.projected)
        self.attend(layer, x)
        self.multiply(layer.output)
        self.multiply(layer.inner, count=2 if layer.gated else 1)
        self.multiply(layer.down)

    def multiply(self, matrix: Matrix, count: int = 1) -> None:
        """count: of matrices of equal size that lie in this one."""
        outputs, inputs = matrix.shape
        num_bytes = matrix.num_bytes + (outputs // count + inputs) * self.dtype.itemsize
        shape = count, 1, outputs // count, inputs
        self.counter.kernels.append(Kernel("multiply_row", num_bytes, 2 * outputs * inputs, shape))

    def attend(self, layer: StaticLayer, projected: Tensor) -> Tensor:
        batch, kv_heads, length, width = layer.keys.shape
        num_heads = layer.attention.config.num_heads
        num_bytes = 2 * layer.keys.numel() * layer.keys.element_size()
        flops = 4 * batch * num_heads * length * width
        self.counter.kernels.append(Kernel("attend_row", num_bytes, flops, attention=(batch * kv_heads, length, width)))
        return projected.new_empty(batch, num_heads * width)

    def to_logits(self, x: Tensor, norm: RootMeanSquare | None = None) -> Tensor:
        if len(x) > self.most_rows:
            return super().to_logits(x, norm)
        self.multiply(self.head)
        return x.new_empty(1, self.head.shape[0], dtype=torch.float32)
