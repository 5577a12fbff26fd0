"""Number of parameters by formula against the network on the meta device, part by part, for every preset."""

import pytest
import torch

from clearhead.costs.formulas.parameters import active_parameters, parameters_by_part
from clearhead.families import preset, presets
from clearhead.model import MixtureLayer, Transformer
from tests.costs.cases import CASES

# The part that a parameter belongs to: that of the first of these strings that its name contains.
PARTS = (
    ("attention_residual", "norms"),
    ("feed_forward_residual", "norms"),
    ("cross_attention", "cross-attention"),
    ("attention", "attention"),
    ("feed_forward", "feed-forward"),
    ("final_norm", "norms"),
    ("embedding.norm", "norms"),
    ("embedding", "embedding"),
    ("relative_bias", "attention"),
    ("head", "head"),
    ("pooler", "pooler"),
    ("classifier", "classifier"),
)


def meta_network(config):
    with torch.device("meta"):
        return Transformer(config)


def count_by_part(network):
    parts = {}
    for name, parameter in network.named_parameters():
        part = next(part for piece, part in PARTS if piece in name)
        parts[part] = parts.get(part, 0) + parameter.numel()
    return parts


def count_idle(network):
    """Parameters of the experts that one token does not select."""
    mixtures = [module for module in network.modules() if isinstance(module, MixtureLayer)]
    return sum(
        stacked[mixture.config.num_chosen :].numel()
        for mixture in mixtures
        for stacked in mixture.parameters(recurse=False)
    )


@pytest.mark.parametrize("name", presets())
def test_parameters_of_every_preset_equal_those_of_the_network(name):
    config = preset(name)
    network = meta_network(config)
    parts = count_by_part(network)
    assert parameters_by_part(config) == parts
    assert active_parameters(config) == sum(parts.values()) - count_idle(network)


@pytest.mark.parametrize("name", CASES)
def test_parameters_of_every_toy_equal_those_of_the_network(name):
    assert parameters_by_part(CASES[name]) == count_by_part(meta_network(CASES[name]))
