"""What GPUs send each other in one step.

    communicate(workload).bytes_each_way

A ring over g GPUs moves (g - 1) / g of the data for a gather or a scatter, twice that for a sum that all receive.
"""

from dataclasses import dataclass

from clearhead.costs.formulas.parameters import parameters
from clearhead.costs.formulas.workload import Workload


@dataclass(frozen=True)
class Communication:
    """By each GPU, in one step."""

    what: str
    bytes_each_way: int


def communicate(workload: Workload) -> Communication | None:
    """None: nothing, where there is one GPU or each reads its own rows."""
    training = workload.phase == "train"
    if workload.gpus == 1 or (workload.parallel == "ddp" and not training):
        return None
    ring = (workload.gpus - 1) / workload.gpus
    weights = sum(parameters(workload.config).values()) * workload.num_bytes
    match workload.parallel:
        case "ddp":
            what, moved = "sum of the gradients", 2 * weights
        case "fsdp":
            what, moved = "weights gathered", weights
            if training:
                what, moved = "weights gathered for forward and backward, gradients scattered", 3 * weights
        case "tp":
            passes = 2 + workload.recompute if training else 1
            what, moved = "sum of each branch's output", 2 * branch_bytes(workload) * passes
    return Communication(what, round(ring * moved))


def branch_bytes(workload: Workload) -> int:
    """Every attention and feed-forward ends in a sum over the GPUs; a parallel layer sums both at once."""
    config, numbers = workload.config, 0
    source = workload.source if config.is_encoder_decoder else workload.context
    for stack, length in (
        (config.encoder, 0 if workload.phase == "decode" else source),
        (config.decoder, 1 if workload.phase == "decode" else 0 if workload.reads_source else workload.context),
    ):
        for layer in stack.layers if stack else ():
            sums = 1 if layer.placement == "parallel" else 2 + (layer.cross_attention is not None)
            numbers += sums * length
    return numbers * workload.batch * config.width * workload.num_bytes
