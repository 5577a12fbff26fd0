"""A tiny LLaMA for tests of checkpoints, which is built, saved and compared in milliseconds."""

import torch

from clearhead.architecture import LongRopeScaling, Rope
from clearhead.families.llama import llama_config
from clearhead.model.transformer import Transformer


def tiny_config(**changes):
    """Return the config; `changes` are arguments of `llama_config`."""
    sizes = {
        "width": 16,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "feed_forward": 24,
        "vocab_size": 31,
        "context": 64,
        "rope": Rope(),
        "tied": True,
    }
    return llama_config(**(sizes | changes))


def longrope(original_context):
    """Return rotary positions with LongRoPE for `tiny_config`."""
    scaling = LongRopeScaling(
        short_factors=(1.0, 1.5), long_factors=(2.0, 4.0), original_context=original_context, attention_factor=1.2
    )
    return Rope(scaling=scaling)


def tiny_network(seed=0, **changes):
    """Build the network with random weights from a seed."""
    torch.manual_seed(seed)
    network = Transformer(tiny_config(**changes)).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return network


def same_network(one, other):
    """Assert that two networks have the same config and equal weights."""
    ours, theirs = one.state_dict(), other.state_dict()
    assert one.config == other.config
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    return True
