"""Bytes of weights, logits and the KV cache, as closed formulas.

    cache_bytes(workload); cache_bytes_per_token(config, bytes_per_element=2)

Peak memory, which includes activations, is in simulation/peak_memory.py.
"""

from clearhead.architecture import GroupedAttention, LatentAttention, ModelConfig
from clearhead.cache import key_value_shape
from clearhead.costs.formulas.attention import num_cached_keys
from clearhead.costs.formulas.parameters import total_parameters
from clearhead.costs.formulas.workload import Workload


def weight_bytes(workload: Workload) -> int:
    """Return the bytes of all weights, at the size of a matrix weight.

    Norms and biases are never quantized, but they are only about a thousandth of the weights.
    """
    return round(total_parameters(workload.config) * workload.bytes_per_weight)


def logit_bytes(workload: Workload) -> int:
    """Return the bytes of the logits."""
    return workload.num_logit_positions * workload.config.vocab_size * workload.bytes_per_activation


def cache_bytes(workload: Workload) -> int:
    """Return the bytes of the KV cache with `context` tokens, equal to KeyValueCache.num_bytes."""
    config, num_elements = workload.config, 0
    assert config.decoder is not None
    for layer in dict.fromkeys(config.decoder.layers):
        num_layers = config.decoder.layers.count(layer)
        num_tokens = min(workload.context, num_cached_keys(layer, config, workload.context - 1, 1))
        num_elements += num_layers * _cache_elements(layer.attention) * num_tokens
    return workload.batch * num_elements * workload.bytes_per_activation


def cache_bytes_per_token(config: ModelConfig, bytes_per_element: int) -> int:
    """Return the bytes that one more token adds to the KV cache while the text is shorter than every window."""
    if config.decoder is None:
        return 0
    return sum(_cache_elements(layer.attention) for layer in config.decoder.layers) * bytes_per_element


def paged_cache_bytes(workload: Workload, page_size: int) -> int:
    """Return the bytes of full pages. Every layer keeps every token there, so sliding windows save nothing."""
    num_pages = -(-workload.context // page_size)
    bytes_per_token = cache_bytes_per_token(workload.config, workload.bytes_per_activation)
    return workload.batch * num_pages * page_size * bytes_per_token


def cross_cache_bytes(workload: Workload) -> int:
    """Return the bytes of the source's keys and values, equal to EncoderOutput.num_bytes after precomputing them."""
    layers = workload.config.decoder.layers if workload.config.decoder else ()
    num_elements = sum(_cache_elements(layer.cross_attention) for layer in layers if layer.cross_attention is not None)
    return workload.batch * workload.source * num_elements * workload.bytes_per_activation


def _cache_elements(attention: GroupedAttention | LatentAttention) -> int:
    """Return the elements cached per token: keys and values, or the latent and the rotary key."""
    num_heads, key_width, value_width = key_value_shape(attention)
    return num_heads * (key_width + value_width)
