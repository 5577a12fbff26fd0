"""Count the parameters of a config without allocating them."""

import torch

from clearhead.architecture import ModelConfig
from clearhead.model import Transformer


def count_parameters(config: ModelConfig) -> int:
    """Return the number of parameters, counting a shared one once, of a network built on the meta device."""
    with torch.device("meta"):
        network = Transformer(config)
    return sum(parameter.numel() for parameter in network.parameters())
