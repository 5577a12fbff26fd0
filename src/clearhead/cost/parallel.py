"""What GPUs send each other in one step.

    communicate(workload).bytes_each_way

A ring over g GPUs moves (g - 1) / g of the data for a gather or a scatter, twice that for a sum that all receive.
"""

from dataclasses import dataclass

from clearhead.cost.parameters import parameters
from clearhead.cost.workload import Workload


@dataclass(frozen=True)
class Communication:
    """By each GPU, in one step."""

    what: str
    bytes_each_way: int


def communicate(workload: Workload) -> Communication:
    ring = (workload.gpus - 1) / workload.gpus
    weights = sum(parameters(workload.config).values()) * workload.num_bytes
    training = workload.phase == "train"
    match workload.parallel:
        case "ddp":
            what, moved = "sum of the gradients", 2 * weights if training else 0
        case "fsdp":
            what, moved = "weights gathered", weights
            if training:
                what, moved = "weights gathered for forward and backward, gradients scattered", 3 * weights
        case "tp":
            what, moved = "sum of each branch's output", 2 * branch_bytes(workload) * (2 if training else 1)
    return Communication(what, round(ring * moved))


def branch_bytes(workload: Workload) -> int:
    """Every attention and feed-forward ends in a sum over the GPUs; a parallel layer sums both at once."""
    numbers = 0
    for stack, length in (
        (workload.config.encoder, workload.source if workload.phase != "decode" else 0),
        (workload.config.decoder, 1 if workload.phase == "decode" else workload.context),
    ):
        for layer in stack.layers if stack else ():
            sums = 1 if layer.placement == "parallel" else 2 + (layer.cross_attention is not None)
            numbers += sums * length
    return numbers * workload.rows * workload.config.width * workload.num_bytes
