"""The part of a model that one of several tensor parallel GPUs holds: some heads and some feed-forward columns.

    part = shard_config(preset("llama-3.1-8b"), num_gpus=4)

Every GPU holds a full copy of what all heads or experts read: embedding, norms and head, routers, the latents of latent
attention with the projections down to them, and a key-value head if there are fewer of them than GPUs. Megatron-LM and
vLLM divide models in the same way, except for embedding and head, and so does `clearhead train` for the models that it
can divide.
"""

from dataclasses import replace

from clearhead.architecture import Experts, FeedForward, GroupedAttention, LatentAttention, Layer, ModelConfig, Stack
from clearhead.errors import require


def shard_config(config: ModelConfig, num_gpus: int) -> ModelConfig:
    """Return the config of the part that one GPU holds. Raise ClearheadError if heads or columns do not divide."""
    encoder, decoder = (stack and _shard_stack(stack, num_gpus) for stack in (config.encoder, config.decoder))
    return replace(config, encoder=encoder, decoder=decoder)


def _shard_stack(stack: Stack, num_gpus: int) -> Stack:
    shards = {layer: _shard_layer(layer, num_gpus) for layer in dict.fromkeys(stack.layers)}
    return replace(stack, layers=tuple(shards[layer] for layer in stack.layers))


def _shard_layer(layer: Layer, num_gpus: int) -> Layer:
    cross_attention = layer.cross_attention and shard_heads(layer.cross_attention, num_gpus)
    match layer.attention:
        case GroupedAttention() as grouped:
            layer = replace(layer, attention=shard_heads(grouped, num_gpus), cross_attention=cross_attention)
        case LatentAttention() as latent:
            num_heads = divide(latent.num_heads, num_gpus, "heads")
            layer = replace(layer, attention=replace(latent, num_heads=num_heads))
    match layer.feed_forward:
        case FeedForward() as dense:
            return replace(layer, feed_forward=_shard_feed_forward(dense, num_gpus))
        case Experts() as experts:
            shared = experts.shared and _shard_feed_forward(experts.shared, num_gpus)
            expert = _shard_feed_forward(experts.expert, num_gpus)
            return replace(layer, feed_forward=replace(experts, expert=expert, shared=shared))


def shard_heads(attention: GroupedAttention, num_gpus: int) -> GroupedAttention:
    """Return the attention that one GPU computes: its part of the heads, and at least one key-value head.

    Raise ClearheadError if the heads do not divide among the GPUs.
    """
    num_heads, num_kv_heads = divide(attention.num_heads, num_gpus, "heads"), attention.num_kv_heads
    num_kv_heads = 1 if num_gpus % num_kv_heads == 0 else divide(num_kv_heads, num_gpus, "key-value heads")
    return replace(attention, num_heads=num_heads, num_kv_heads=num_kv_heads)


def _shard_feed_forward(config: FeedForward, num_gpus: int) -> FeedForward:
    """Return the feed-forward that one GPU computes: its part of the inner columns."""
    return replace(config, width=divide(config.width, num_gpus, "feed-forward columns"))


def divide(count: int, num_gpus: int, what: str) -> int:
    """Return count / num_gpus; raise ClearheadError if it is not a whole number."""
    require(
        count % num_gpus == 0,
        f"tensor parallelism cannot divide {count} {what} among {num_gpus} GPUs; use a number that divides {count}",
    )
    return count // num_gpus
