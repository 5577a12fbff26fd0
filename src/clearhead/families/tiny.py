"""The architecture of a released model at toy size: all choices kept, all sizes small.

    config = shrink(preset("llama-4-scout"))   # eight layers, 64 wide, 257 tokens; the same pattern of layers

A shrunken model computes as the released one does and runs anywhere, but knows nothing: its weights are random.
"""

import math
from dataclasses import dataclass, replace

from clearhead.architecture import (
    AudioEmbedding,
    Chunked,
    Disentangled,
    Embedding,
    Experts,
    FeedForward,
    GroupedAttention,
    LatentAttention,
    LearnedPositions,
    LongRopeScaling,
    ModelConfig,
    Rope,
    SlidingWindow,
    Stack,
    YarnScaling,
)
from clearhead.families.rope import recover_mscale, yarn_score_scale


@dataclass(frozen=True, kw_only=True)
class TinySizes:
    """The sizes of a shrunken model. The other sizes follow from these; the defaults suit a tokenizer of bytes."""

    vocab_size: int = 257  # bytes, and one token for the end of a text
    width: int = 64
    context: int = 128
    head_width: int = 16
    feed_forward: int = 256  # four times the width, which a config.json of GPT-1, BLOOM and MPT cannot change
    expert: int = 128  # the feed-forward of one expert
    window: int = 32  # of sliding windows and chunks
    max_layers: int = 8  # enough for every pattern of layers that a preset repeats


_NUM_HEADS, _MAX_GROUPED_HEADS, _NUM_EXPERTS, _MAX_CHOSEN, _NUM_GROUPS = 4, 2, 8, 4, 4
_DEFAULT_SIZES = TinySizes()


def shrink(config: ModelConfig, sizes: TinySizes = _DEFAULT_SIZES) -> ModelConfig:
    """Return the config at toy size: at most `max_layers` layers, all choices kept, all sizes small."""
    head = config.head
    if head is not None and math.isclose(head.scale, config.width**-0.5):  # PaLM: it follows from the width
        head = replace(head, scale=sizes.width**-0.5)
    return replace(
        config,
        width=sizes.width,
        context=sizes.context,
        encoder=config.encoder and _shrink_stack(config.encoder, sizes),
        decoder=config.decoder and _shrink_stack(config.decoder, sizes),
        head=head,
    )


def _shrink_stack(stack: Stack, sizes: TinySizes) -> Stack:
    layers = tuple(
        replace(
            layer,
            attention=_shrink_attention(layer.attention, sizes),
            cross_attention=layer.cross_attention and _shrink_grouped(layer.cross_attention, sizes),
            feed_forward=_shrink_feed_forward(layer.feed_forward, sizes),
        )
        for layer in stack.layers[: sizes.max_layers]
    )
    return replace(stack, embedding=_shrink_embedding(stack.embedding, sizes), layers=layers)


def _shrink_embedding(embedding: Embedding | AudioEmbedding, sizes: TinySizes) -> Embedding | AudioEmbedding:
    if isinstance(embedding, AudioEmbedding):  # the number of bands and the length belong to the audio's features
        return embedding
    positions = embedding.positions
    if isinstance(positions, LearnedPositions):
        positions = replace(positions, num_positions=sizes.context)
    scale = math.sqrt(sizes.width) if embedding.scale != 1.0 else 1.0
    return replace(embedding, vocab_size=sizes.vocab_size, positions=positions, scale=scale)


def _shrink_attention(
    attention: GroupedAttention | LatentAttention, sizes: TinySizes
) -> GroupedAttention | LatentAttention:
    if isinstance(attention, GroupedAttention):
        return _shrink_grouped(attention, sizes)
    width = sizes.head_width
    return replace(
        attention,
        scale=_rescale(attention, width + width // 2),
        num_heads=_NUM_HEADS,
        plain_width=width,
        rotary_width=width // 2,
        value_width=width * 3 // 4,
        latent_rank=width * 3 // 2,
        query_rank=attention.query_rank and width * 5 // 4,
    )


def _rescale(attention: LatentAttention, width: int) -> float | None:
    """Return the score scale for queries of another width, with the same magnitude of YaRN."""
    scaling = attention.rope.scaling
    if attention.scale is None or not isinstance(scaling, YarnScaling):
        return attention.scale
    mscale = recover_mscale(attention.scale, attention.plain_width + attention.rotary_width, scaling.factor)
    return attention.scale if mscale is None else yarn_score_scale(width, scaling.factor, mscale)


def _shrink_grouped(attention: GroupedAttention, sizes: TinySizes) -> GroupedAttention:
    match attention.pattern:
        case SlidingWindow():
            attention = replace(attention, pattern=SlidingWindow(size=sizes.window))
        case Chunked():
            attention = replace(attention, pattern=Chunked(size=sizes.window))
    follows_width = math.isclose(attention.scale or 1.0, attention.head_width**-0.5)
    if attention.scale is not None and (follows_width or isinstance(attention.position, Disentangled)):
        scale = attention.scale * math.sqrt(attention.head_width / sizes.head_width)
        attention = replace(attention, scale=scale)
    if isinstance(attention.position, Rope):
        rope = _shrink_rope(attention.position, attention.head_width, sizes.head_width)
        attention = replace(attention, position=rope, head_width=sizes.head_width)
    is_grouped = attention.num_kv_heads != attention.num_heads
    num_kv_heads = min(attention.num_kv_heads, _MAX_GROUPED_HEADS) if is_grouped else _NUM_HEADS
    return replace(attention, num_heads=_NUM_HEADS, num_kv_heads=num_kv_heads, head_width=sizes.head_width)


def _shrink_rope(rope: Rope, old_width: int, head_width: int) -> Rope:
    """Return a Rope that rotates the same part of a narrower head, with as many factors as it has pairs."""
    num_pairs = max((rope.width or old_width) * head_width // (2 * old_width), 1)
    if isinstance(rope.scaling, LongRopeScaling):
        factors = {name: getattr(rope.scaling, name)[:num_pairs] for name in ("short_factors", "long_factors")}
        rope = replace(rope, scaling=replace(rope.scaling, **factors))
    return rope if rope.width is None else replace(rope, width=2 * num_pairs)


def _shrink_feed_forward(config: FeedForward | Experts, sizes: TinySizes) -> FeedForward | Experts:
    if isinstance(config, FeedForward):
        return replace(config, width=sizes.feed_forward)
    groups = config.router.groups and replace(config.router.groups, num_groups=_NUM_GROUPS, num_kept=_NUM_GROUPS // 2)
    return replace(
        config,
        num_experts=_NUM_EXPERTS,
        num_chosen=min(config.num_chosen, _MAX_CHOSEN),
        router=replace(config.router, groups=groups),
        expert=replace(config.expert, width=sizes.expert),
        shared=config.shared and replace(config.shared, width=sizes.expert),
    )
