"""Initial weights, all in one place.

    initialize(network, config)   # called by Transformer(config)

Values are drawn from torch's generator: seed it with torch.manual_seed. Tensors on the meta device are left unchanged.

    norms            weight 1 (0 with unit offset), bias 0; set by the norms themselves
    biases           0
    embeddings       N(0, d²), where d is the config's deviation; N(0, 1/D) with Xavier
    matrices         N(0, d²), or Xavier uniform
    branch outputs   the matrices that write to the residual stream: d / √(2L) with residual_scaled (GPT-2)
"""

import math

import torch
from torch import nn

from clearhead.architecture import ModelConfig, NormalInitial, XavierInitial

_BRANCH_OUTPUTS = (".output.weight", ".down.weight", "feed_forward.down")


@torch.no_grad()
def initialize(network: nn.Module, config: ModelConfig) -> None:
    """Draw all parameters of a network in place."""
    num_layers = sum(len(stack.layers) for stack in (config.encoder, config.decoder) if stack)
    embeddings = {id(part.weight) for part in network.modules() if isinstance(part, nn.Embedding)}
    for name, parameter in network.named_parameters():
        if parameter.is_meta or (parameter.ndim == 2 and name.endswith("_norm.weight")):  # norms of single heads
            continue
        if parameter.ndim < 2 or name.endswith("_bias"):  # vectors, and biases of experts or heads with two dimensions
            if name.endswith("bias"):  # the other vectors are weights of norms, which set their own
                parameter.zero_()
        elif id(parameter) in embeddings or name == "head.weight":
            deviation = config.initial.deviation if isinstance(config.initial, NormalInitial) else config.width**-0.5
            parameter.normal_(0.0, deviation)
        else:
            is_branch_output = name.endswith(_BRANCH_OUTPUTS)
            draw_matrix(parameter, config.initial, 1 / math.sqrt(2 * num_layers) if is_branch_output else 1.0)


def draw_matrix(matrix: nn.Parameter, initial: NormalInitial | XavierInitial, branch_scale: float) -> None:
    """Draw a matrix (out, in), or those of all experts (E, out, in), in place."""
    match initial:
        case NormalInitial():
            matrix.normal_(0.0, initial.deviation * (branch_scale if initial.residual_scaled else 1.0))
        case XavierInitial():
            bound = math.sqrt(6 / (matrix.shape[-2] + matrix.shape[-1]))
            matrix.uniform_(-bound, bound)
