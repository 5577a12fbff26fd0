"""The kernels of a decode step in the CUDA graph of backends/cuda/decoder.py, on the meta device.

    run = simulate_graph(workload); print(len(run.kernels))

No Triton kernel is launched on the meta device, so each one is recorded with the sizes of its operands.
"""

import math

import torch
from torch import Tensor, nn

from clearhead.architecture import SlidingWindow
from clearhead.backends import GraphDecoder, GraphLayer, NormModule, Projection
from clearhead.costs.formulas import Workload
from clearhead.costs.simulation.counter import Kernel, KernelCounter, tensor_bytes
from clearhead.costs.simulation.workload_steps import build_network, choose_greedily
from clearhead.model import Transformer


def simulate_graph(workload: Workload) -> KernelCounter:
    """Return the kernels of one step. Its memory starts with the decoder's own buffers, without the weights."""
    counter = KernelCounter()
    counter.in_graph = True
    decoder = _CountedGraphDecoder(build_network(workload, "meta"), workload, counter)
    counter.live_bytes = decoder.num_bytes
    with torch.no_grad(), counter:
        decoder.run_step()
    return counter


class _CountedGraphDecoder(GraphDecoder):
    """A decoder that records its Triton kernels; the counter sees what larger batches run in PyTorch."""

    def __init__(self, network: Transformer, workload: Workload, counter: KernelCounter):
        super().__init__(network, workload.batch, workload.context, choose_greedily)
        self.counter = counter

    def fused_linear(
        self,
        x: Tensor,
        projection: Projection,
        *,
        norm: NormModule | None = None,
        residual: Tensor | None = None,
        gated: bool = False,
        activation: str = "",
    ) -> Tensor:
        """Record one `multiply_row`, and `moments` for the mean and deviation of a layer norm."""
        num_matrices = 2 if gated else 1
        outputs, inputs = projection.shape
        y = x.new_empty(len(x), outputs // num_matrices) if residual is None else residual
        vectors = [x, y, projection.bias, residual, *(() if norm is None else norm.parameters())]
        num_bytes = projection.num_bytes + sum(tensor_bytes(vector) for vector in vectors if vector is not None)
        shape = num_matrices, len(x), outputs // num_matrices, inputs
        self.counter.kernels.append(Kernel("multiply_row", num_bytes, 2 * math.prod(shape), shape))
        if isinstance(norm, nn.LayerNorm):  # reads x twice more, for its mean and its deviation
            self.counter.kernels.append(Kernel("moments", 2 * tensor_bytes(x), width=inputs))
        return y

    def attend(self, layer: GraphLayer, projected: Tensor) -> Tensor:
        """Record one `attend_row`, which reads at most the window of a sliding layer."""
        batch, num_kv_heads, length, width = layer.keys.shape
        config = layer.block.attention.config
        num_heads, pattern = config.num_heads, config.pattern
        length = min(length, pattern.size) if isinstance(pattern, SlidingWindow) else length
        num_bytes = 2 * batch * num_kv_heads * length * width * layer.keys.element_size()
        flops = 4 * batch * num_heads * length * width
        attention_shape = (batch * num_kv_heads, length, width)
        self.counter.kernels.append(Kernel("attend_row", num_bytes, flops, attention_shape=attention_shape))
        return projected.new_empty(batch, num_heads * width)
