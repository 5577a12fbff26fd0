"""Bits per weight of packed formats, with the matrices that keep 8 bits when the others have 4.

average_bits(config, "int4", "cpu")      # 5.0 for most matrices, 8.5 for those of backends/sensitivity.py
"""

from functools import cache

from clearhead.architecture import Embedding, Experts, FeedForward, GroupedAttention, ModelConfig, Stack
from clearhead.backends import is_sensitive
from clearhead.cache import key_value_shape
from clearhead.costs.formulas.parameters import total_parameters

# Bits per weight of a matrix. Blocks of 32 weights share a 16-bit scale; int4 and q4_1 also store a 16-bit offset
# (int8 and int4: backends/packed/formats.py; q4_0, q4_1 and q8_0: blocks of GGUF).
PACKED_BITS = {"int8": 8.5, "int4": 5.0, "q4_0": 4.5, "q4_1": 5.0, "q8_0": 8.5}


@cache
def average_bits(config: ModelConfig, weights: str, device_type: str) -> float:
    """Return the bits per weight of a network with packed weights, averaged over all its parameters."""
    bits = PACKED_BITS[weights]
    if weights != "int4":
        return bits
    share = _num_sensitive(config, device_type) / total_parameters(config)
    return bits + (PACKED_BITS["int8"] - bits) * share


def _num_sensitive(config: ModelConfig, device_type: str) -> int:
    """Return the number of weights that keep 8 bits."""
    stacks = {"encoder": config.encoder, "decoder": config.decoder}
    tables = [stack.embedding for stack in stacks.values() if stack and isinstance(stack.embedding, Embedding)]
    widths = [table.width or config.width for table in tables]
    count = config.vocab_size * sum(widths[:1] if config.share_embeddings else widths)
    if config.head is not None and not config.head.tied:
        count += config.vocab_size * widths[-1]
    return count + sum(_in_layers(config, name, stack, device_type) for name, stack in stacks.items() if stack)


def _in_layers(config: ModelConfig, stack_name: str, stack: Stack, device_type: str) -> int:
    """Return the number of weights in the sensitive value and down projections of a stack."""
    count = 0
    for number, layer in enumerate(stack.layers[:1] if stack.shared_layers else stack.layers):
        name = f"{stack_name}.layers.{number}"
        for attention in (layer.attention, layer.cross_attention):
            if isinstance(attention, GroupedAttention) and is_sensitive(
                config, f"{name}.attention.value.weight", device_type
            ):
                num_kv_heads, _, value_width = key_value_shape(attention)
                count += config.width * num_kv_heads * value_width
        if is_sensitive(config, f"{name}.feed_forward.down.weight", device_type):
            count += config.width * _inner_width(layer.feed_forward)
    return count


def _inner_width(config: FeedForward | Experts) -> int:
    """Return the columns of all down projections of a layer."""
    if isinstance(config, FeedForward):
        return config.width
    return config.num_experts * config.expert.width + (config.shared.width if config.shared else 0)
