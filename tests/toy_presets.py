"""Configs of released models at toy size.

config = shrink(preset("llama-4-scout"))   # at most eight layers, all choices kept, all sizes small
"""

import math
from dataclasses import replace

from clearhead.architecture import (
    Chunked,
    Experts,
    FeedForward,
    GroupedAttention,
    LatentAttention,
    LearnedPositions,
    ModelConfig,
    SlidingWindow,
    Stack,
)
from tests.model.toys import CONTEXT, VOCAB, WIDTH


def shrink(config: ModelConfig) -> ModelConfig:
    """Return the config at toy size: at most eight layers, all choices kept, all sizes small."""

    def shrink_attention(config: GroupedAttention | LatentAttention) -> GroupedAttention | LatentAttention:
        match config.pattern:
            case SlidingWindow():
                config = replace(config, pattern=SlidingWindow(size=3))
            case Chunked():
                config = replace(config, pattern=Chunked(size=3))
        if isinstance(config, LatentAttention):
            ranks = {"latent_rank": 6, "query_rank": config.query_rank and 5}
            return replace(config, num_heads=4, plain_width=4, rotary_width=2, value_width=3, **ranks)
        num_kv_heads = 4 if config.num_kv_heads == config.num_heads else min(config.num_kv_heads, 2)
        return replace(config, num_heads=4, num_kv_heads=num_kv_heads, head_width=4)

    def shrink_feed_forward(config: FeedForward | Experts) -> FeedForward | Experts:
        if isinstance(config, FeedForward):
            return replace(config, width=24)
        groups = config.router.groups and replace(config.router.groups, num_groups=4, num_kept=2)
        small = replace(
            config, num_experts=8, num_chosen=min(config.num_chosen, 4), router=replace(config.router, groups=groups)
        )
        return replace(
            small,
            expert=shrink_feed_forward(config.expert),
            shared=config.shared and shrink_feed_forward(config.shared),
        )

    def shrink_stack(config: Stack) -> Stack:
        positions = config.embedding.positions
        if isinstance(positions, LearnedPositions):
            positions = replace(positions, num_positions=CONTEXT)
        layers = tuple(
            replace(
                layer,
                attention=shrink_attention(layer.attention),
                cross_attention=layer.cross_attention and shrink_attention(layer.cross_attention),
                feed_forward=shrink_feed_forward(layer.feed_forward),
            )
            for layer in config.layers[:8]
        )
        scale = math.sqrt(WIDTH) if config.embedding.scale != 1.0 else 1.0
        embedding = replace(config.embedding, vocab_size=VOCAB, positions=positions, scale=scale)
        return replace(config, embedding=embedding, layers=layers)

    return replace(
        config,
        width=WIDTH,
        context=CONTEXT,
        encoder=config.encoder and shrink_stack(config.encoder),
        decoder=config.decoder and shrink_stack(config.decoder),
    )
