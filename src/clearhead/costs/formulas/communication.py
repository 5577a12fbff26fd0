"""Bytes that GPUs exchange in one step.

    estimate_communication(workload).bytes_each_way

With a ring over g GPUs, an all-gather or a reduce-scatter moves (g - 1) / g of the data, an all-reduce twice as much.
"""

from dataclasses import dataclass

from clearhead.costs.formulas.parameters import total_parameters
from clearhead.costs.formulas.workload import Workload


@dataclass(frozen=True)
class Communication:
    """What each GPU sends, and receives, in one step."""

    description: str
    bytes_each_way: int


def estimate_communication(workload: Workload) -> Communication | None:
    """Return what each GPU sends, or None for one GPU and for inference on separate parts of a batch."""
    is_training = workload.phase == "train"
    if workload.gpus == 1 or (workload.parallel == "ddp" and not is_training):
        return None
    ring = (workload.gpus - 1) / workload.gpus
    weight_bytes = total_parameters(workload.config) * workload.bytes_per_activation
    match workload.parallel:
        case "ddp":
            description, num_bytes = "all-reduce of the gradients", 2 * weight_bytes
        case "fsdp":
            description, num_bytes = "all-gather of the weights", weight_bytes
            if is_training:
                description = "all-gather of the weights for forward and backward, reduce-scatter of the gradients"
                num_bytes = 3 * weight_bytes
        case "tp":
            num_passes = 2 + workload.recompute if is_training else 1
            description, num_bytes = "all-reduce of each branch's output", 2 * _branch_bytes(workload) * num_passes
    return Communication(description, round(ring * num_bytes))


def _branch_bytes(workload: Workload) -> int:
    """Return the bytes of all branch outputs that tensor parallel GPUs sum in one forward pass.

    Every attention and every feed-forward ends in such a sum; a layer with parallel branches sums both at once.
    """
    config, num_tokens = workload.config, 0
    source = workload.source if config.is_encoder_decoder else workload.context
    for stack, length in (
        (config.encoder, 0 if workload.phase == "decode" else source),
        (config.decoder, 1 if workload.phase == "decode" else 0 if workload.encodes_source else workload.context),
    ):
        for layer in stack.layers if stack else ():
            num_sums = 1 if layer.placement == "parallel" else 2 + (layer.cross_attention is not None)
            num_tokens += num_sums * length
    return num_tokens * workload.batch * config.width * workload.bytes_per_activation
