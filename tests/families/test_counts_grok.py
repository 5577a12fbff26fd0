"""Parameters of the Grok presets, counted on the meta device, against the published numbers."""

import torch

from clearhead.families import preset
from clearhead.model.transformer import Transformer


def sizes(name):
    with torch.device("meta"):
        network = Transformer(preset(name))
    return {name: parameter.numel() for name, parameter in network.named_parameters()}


def test_grok1():
    """xAI's README says 314B: the layers, cut off after the point; the token table has 0.8B more."""
    found = sizes("grok-1")
    layers = sum(size for name, size in found.items() if ".layers." in name)
    assert layers // 10**9 == 314
    assert sum(found.values()) - layers == 131072 * 6144 + 6144


def test_grok2():
    """A reader's sum over the released tensors: the Hub, xai-org/grok-2, discussion 6."""
    assert sum(sizes("grok-2").values()) == 269_515_497_472
