"""Closed formulas: what a workload takes in parameters, FLOPs, bytes and memory, from the config alone.

    costs = operation_costs(Workload(config=config, phase="decode", context=4096, source=4096))

workload         what is to be costed: a model, a phase, sizes, precision and GPUs
parameters       number of parameters of every part of a model
matrix_products  one matrix product: its FLOPs, its operands and its formula
attention        the matrix products of attention, and how many keys a query attends to
packed_weights   bits per weight of packed formats
operations       all matrix products of a workload
memory           bytes of weights, logits and the KV cache
tensor_parallel  the part of a model that one tensor parallel GPU holds
communication    bytes that GPUs exchange

Nothing here builds or runs a network; the package depends on neither `simulation` nor `calibration`.
"""

from clearhead.costs.formulas.attention import has_fused_kernel
from clearhead.costs.formulas.communication import Communication, estimate_communication
from clearhead.costs.formulas.memory import (
    cache_bytes,
    cache_bytes_per_token,
    cross_cache_bytes,
    logit_bytes,
    weight_bytes,
)
from clearhead.costs.formulas.operations import OperationCost, expected_experts, list_operations, operation_costs
from clearhead.costs.formulas.parameters import (
    active_parameters,
    layer_parameters,
    parameters_by_part,
    total_parameters,
)
from clearhead.costs.formulas.tensor_parallel import shard_config, shard_heads
from clearhead.costs.formulas.workload import (
    OPTIMIZER_STATES,
    DeviceType,
    Optimizer,
    Parallel,
    Phase,
    Workload,
    default_context,
    default_source,
)

__all__ = [
    "OPTIMIZER_STATES",
    "Communication",
    "DeviceType",
    "OperationCost",
    "Optimizer",
    "Parallel",
    "Phase",
    "Workload",
    "active_parameters",
    "cache_bytes",
    "cache_bytes_per_token",
    "cross_cache_bytes",
    "default_context",
    "default_source",
    "estimate_communication",
    "expected_experts",
    "has_fused_kernel",
    "layer_parameters",
    "list_operations",
    "logit_bytes",
    "operation_costs",
    "parameters_by_part",
    "shard_config",
    "shard_heads",
    "total_parameters",
    "weight_bytes",
]
