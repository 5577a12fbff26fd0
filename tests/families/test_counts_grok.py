"""Parameters of the Grok presets, counted on the meta device and compared with the published numbers."""

import torch

from clearhead.families import preset
from clearhead.model.transformer import Transformer


def parameter_sizes(name):
    with torch.device("meta"):
        network = Transformer(preset(name))
    return {name: parameter.numel() for name, parameter in network.named_parameters()}


def test_number_of_parameters_of_grok1():
    """xAI's README gives 314B, which are the layers, rounded down; the token table has another 0.8B."""
    sizes = parameter_sizes("grok-1")
    layers = sum(size for name, size in sizes.items() if ".layers." in name)
    assert layers // 10**9 == 314
    assert sum(sizes.values()) - layers == 131072 * 6144 + 6144


def test_number_of_parameters_of_grok2():
    """Compare with a sum over the released tensors: the Hub, xai-org/grok-2, discussion 6."""
    assert sum(parameter_sizes("grok-2").values()) == 269_515_497_472
