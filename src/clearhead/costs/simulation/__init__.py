"""Simulation: what a workload runs, operation by operation, on the meta device, where no tensor has data.

    run = simulate(workload); print(len(run.kernels), run.peak_bytes)

workload_steps   a workload as a callable step, on a real device or on the meta device
counter          KernelCounter: FLOPs, bytes, kernels and live memory of whatever PyTorch runs
meta_run         simulate: the step on the meta device under the counter
cuda_graph       the same for a decode step that runs in a CUDA graph
peak_memory      memory of a workload, and the largest batch and context that fit

This package builds on `formulas` and does not depend on `calibration`.
"""

from clearhead.costs.simulation.counter import Kernel, KernelCounter
from clearhead.costs.simulation.meta_run import simulate
from clearhead.costs.simulation.peak_memory import MemoryEstimate, estimate_memory, largest_batch, largest_context
from clearhead.costs.simulation.workload_steps import (
    Step,
    build_network,
    choose_greedily,
    decode_step,
    prepare_step,
    uses_cuda_graph,
)

__all__ = [
    "Kernel",
    "KernelCounter",
    "MemoryEstimate",
    "Step",
    "build_network",
    "choose_greedily",
    "decode_step",
    "estimate_memory",
    "largest_batch",
    "largest_context",
    "prepare_step",
    "simulate",
    "uses_cuda_graph",
]
