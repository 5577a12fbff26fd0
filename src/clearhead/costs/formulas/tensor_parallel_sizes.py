"""A model as one of several tensor parallel GPUs holds it: some of the heads, some of the inner columns.

    share_of(preset("llama-3.1-8b"), gpus=4)

Whole on every GPU is what all heads or experts read: latents with the projections down to them, routers; a key-value
head where there are fewer of them than GPUs; embedding, norms and head. So divide Megatron-LM and vLLM, but for
embedding and head, and so does `clearhead train` where it divides at all.
"""

from dataclasses import replace

from clearhead.architecture import Experts, FeedForward, GroupedAttention, LatentAttention, Layer, ModelConfig, Stack
from clearhead.errors import require


def share_of(config: ModelConfig, gpus: int) -> ModelConfig:
    encoder, decoder = (stack and of_stack(stack, gpus) for stack in (config.encoder, config.decoder))
    return replace(config, encoder=encoder, decoder=decoder)


def of_stack(stack: Stack, gpus: int) -> Stack:
    shares = {layer: of_layer(layer, gpus) for layer in dict.fromkeys(stack.layers)}
    return replace(stack, layers=tuple(shares[layer] for layer in stack.layers))


def of_layer(layer: Layer, gpus: int) -> Layer:
    across = layer.cross_attention and of_heads(layer.cross_attention, gpus)
    match layer.attention:
        case GroupedAttention() as grouped:
            layer = replace(layer, attention=of_heads(grouped, gpus), cross_attention=across)
        case LatentAttention() as latent:
            layer = replace(layer, attention=replace(latent, num_heads=part(latent.num_heads, gpus, "heads")))
    match layer.feed_forward:
        case FeedForward() as one:
            return replace(layer, feed_forward=of_columns(one, gpus))
        case Experts() as many:
            shared = many.shared and of_columns(many.shared, gpus)
            return replace(layer, feed_forward=replace(many, expert=of_columns(many.expert, gpus), shared=shared))


def of_heads(attention: GroupedAttention, gpus: int) -> GroupedAttention:
    num_heads, kv_heads = part(attention.num_heads, gpus, "heads"), attention.num_kv_heads
    kv_heads = 1 if gpus % kv_heads == 0 else part(kv_heads, gpus, "key-value heads")
    return replace(attention, num_heads=num_heads, num_kv_heads=kv_heads)


def of_columns(config: FeedForward, gpus: int) -> FeedForward:
    return replace(config, width=part(config.width, gpus, "inner columns"))


def part(count: int, gpus: int, of_what: str) -> int:
    require(count % gpus == 0, f"tp shares {of_what}: {count} do not divide among {gpus} GPUs")
    return count // gpus
