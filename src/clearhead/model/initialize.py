"""Initial weights, all in one place.

    initialize(network, config)   # called by Transformer(config)

Values are drawn from torch's generator: seed it with torch.manual_seed. Tensors on the meta device are left unchanged.

    norms            weight 1 (0 with unit offset), bias 0; set by the norms themselves
    biases           0
    embeddings       N(0, d²), where d is the config's deviation; N(0, 1/D) or uniform with Xavier; N(0, 1) with fan-in
    matrices         N(0, d²), Xavier uniform, or N(0, 1/columns) with fan-in
    branch outputs   the matrices that write to the residual stream: d / √(2L) with residual_scaled (GPT-2)
"""

import math

import torch
from torch import nn

from clearhead.architecture import FanInInitial, ModelConfig, NormalInitial, XavierInitial

_BRANCH_OUTPUTS = (".output.weight", ".down.weight", "feed_forward.down")


@torch.no_grad()
def initialize(network: nn.Module, config: ModelConfig) -> None:
    """Draw all parameters of a network in place."""
    num_layers = sum(len(stack.layers) for stack in (config.encoder, config.decoder) if stack)
    embeddings = {id(part.weight) for part in network.modules() if isinstance(part, nn.Embedding)}
    for name, parameter in network.named_parameters():
        if parameter.is_meta or not parameter.requires_grad:  # a fixed table keeps its values
            continue
        if parameter.ndim == 2 and name.endswith("_norm.weight"):  # norms of single heads
            continue
        if parameter.ndim < 2 or name.endswith("_bias"):  # vectors, and biases of experts or heads with two dimensions
            if name.endswith("bias"):  # the other vectors are weights of norms, which set their own
                parameter.zero_()
        elif id(parameter) in embeddings or name == "head.weight":
            _draw_table(parameter, config)
        else:
            is_branch_output = name.endswith(_BRANCH_OUTPUTS)
            draw_matrix(parameter, config.initial, 1 / math.sqrt(2 * num_layers) if is_branch_output else 1.0)


def _draw_table(table: nn.Parameter, config: ModelConfig) -> None:
    """Draw an embedding table or the matrix of the head (rows, D) in place."""
    match config.initial:
        case NormalInitial(deviation=deviation):
            table.normal_(0.0, deviation)
        case XavierInitial(tables=False):
            table.normal_(0.0, config.width**-0.5)
        case XavierInitial():
            draw_matrix(table, config.initial, branch_scale=1.0)
        case FanInInitial():
            table.normal_(0.0, 1.0)


def draw_matrix(
    matrix: nn.Parameter, initial: NormalInitial | XavierInitial | FanInInitial, branch_scale: float
) -> None:
    """Draw a matrix (out, in), or those of all experts (E, out, in), in place."""
    match initial:
        case NormalInitial():
            matrix.normal_(0.0, initial.deviation * (branch_scale if initial.residual_scaled else 1.0))
        case XavierInitial():
            bound = math.sqrt(6 / (matrix.shape[-2] + matrix.shape[-1]))
            matrix.uniform_(-bound, bound)
        case FanInInitial():
            matrix.normal_(0.0, matrix.shape[-1] ** -0.5)
