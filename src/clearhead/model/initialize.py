"""Every initial weight in one table. Draws from torch's generator: seed it with torch.manual_seed.

initialize(network, config)   # called by Transformer(config); does nothing on the meta device

norms            weight 1 (0 with unit offset), bias 0: set where they are built
biases           0
embeddings       N(0, d²) with d the config's deviation; N(0, 1/D) with Xavier
matrices         N(0, d²), or Xavier uniform
branch ends      the matrices that write into the residual: d / √(2L) where residual_scaled (GPT-2)
"""

import math

import torch
from torch import nn

from clearhead.architecture import ModelConfig, NormalInitial, XavierInitial

BRANCH_ENDS = (".output.weight", ".down.weight", "feed_forward.down")


@torch.no_grad()
def initialize(network: nn.Module, config: ModelConfig) -> None:
    num_layers = sum(len(stack.layers) for stack in (config.encoder, config.decoder) if stack)
    embeddings = {id(part.weight) for part in network.modules() if isinstance(part, nn.Embedding)}
    for name, parameter in network.named_parameters():
        if parameter.is_meta:
            continue
        if parameter.ndim < 2 or name.endswith("_bias"):
            if name.endswith("bias"):
                parameter.zero_()
        elif id(parameter) in embeddings or name == "head.weight":
            deviation = config.initial.deviation if isinstance(config.initial, NormalInitial) else config.width**-0.5
            parameter.normal_(0.0, deviation)
        else:
            end = name.endswith(BRANCH_ENDS)
            fill(parameter, config.initial, 1 / math.sqrt(2 * num_layers) if end else 1.0)


def fill(matrix: nn.Parameter, initial: NormalInitial | XavierInitial, branch_scale: float) -> None:
    """matrix (out, in) or experts (E, out, in)."""
    match initial:
        case NormalInitial():
            matrix.normal_(0.0, initial.deviation * (branch_scale if initial.residual_scaled else 1.0))
        case XavierInitial():
            bound = math.sqrt(6 / (matrix.shape[-2] + matrix.shape[-1]))
            matrix.uniform_(-bound, bound)
