"""Released models at toy size.

config = shrink(preset("llama-4-scout"))   # eight layers at most, every choice kept, every size small
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
    """The same plan at toy size: eight layers at most, every choice kept, every size small."""

    def attention(of: GroupedAttention | LatentAttention) -> GroupedAttention | LatentAttention:
        match of.pattern:
            case SlidingWindow():
                of = replace(of, pattern=SlidingWindow(size=3))
            case Chunked():
                of = replace(of, pattern=Chunked(size=3))
        if isinstance(of, LatentAttention):
            ranks = {"latent_rank": 6, "query_rank": of.query_rank and 5}
            return replace(of, num_heads=4, plain_width=4, rotary_width=2, value_width=3, **ranks)
        num_kv_heads = 4 if of.num_kv_heads == of.num_heads else min(of.num_kv_heads, 2)
        return replace(of, num_heads=4, num_kv_heads=num_kv_heads, head_width=4)

    def feed_forward(of: FeedForward | Experts) -> FeedForward | Experts:
        if isinstance(of, FeedForward):
            return replace(of, width=24)
        groups = of.router.groups and replace(of.router.groups, num_groups=4, num_kept=2)
        small = replace(of, num_experts=8, num_chosen=min(of.num_chosen, 4), router=replace(of.router, groups=groups))
        return replace(small, expert=feed_forward(of.expert), shared=of.shared and feed_forward(of.shared))

    def stack(of: Stack) -> Stack:
        positions = of.embedding.positions
        if isinstance(positions, LearnedPositions):
            positions = replace(positions, num_positions=CONTEXT)
        layers = tuple(
            replace(
                one,
                attention=attention(one.attention),
                cross_attention=one.cross_attention and attention(one.cross_attention),
                feed_forward=feed_forward(one.feed_forward),
            )
            for one in of.layers[:8]
        )
        scale = math.sqrt(WIDTH) if of.embedding.scale != 1.0 else 1.0
        embedding = replace(of.embedding, vocab_size=VOCAB, positions=positions, scale=scale)
        return replace(of, embedding=embedding, layers=layers)

    return replace(
        config,
        width=WIDTH,
        context=CONTEXT,
        encoder=config.encoder and stack(config.encoder),
        decoder=config.decoder and stack(config.decoder),
    )
