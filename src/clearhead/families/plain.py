"""What GPT, BERT, BLOOM and MPT share: multi-head attention over the whole width, an ungated feed-forward, LayerNorm.

layers = plain_layers([multi_head(768, 12)] * 12, feed_forward, norm); parts = plain_parts(stack)   # and back
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from clearhead.architecture import FeedForward, GroupedAttention, Layer, LayerNorm, Stack
from clearhead.errors import ClearheadError
from clearhead.families.family import grouped_of, narrow


def multi_head(
    width: int, num_heads: int, *, input_bias: bool = True, output_bias: bool = True, **options: Any
) -> GroupedAttention:
    """`options` go to GroupedAttention."""
    if num_heads < 1 or width % num_heads:
        raise ClearheadError(f"the width {width} cannot be split among {num_heads} heads; it must be a multiple")
    return GroupedAttention(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_width=width // num_heads,
        input_bias=input_bias,
        output_bias=output_bias,
        **options,
    )


def plain_layers(
    attentions: Iterable[GroupedAttention],
    feed_forward: FeedForward,
    norm: LayerNorm,
    placement: Literal["pre", "post"] = "pre",
) -> tuple[Layer, ...]:
    return tuple(
        Layer(attention=attention, feed_forward=feed_forward, norm=norm, placement=placement)
        for attention in attentions
    )


@dataclass(frozen=True)
class Plain:
    stack: Stack
    attentions: list[GroupedAttention]  # one for each layer
    feed_forward: FeedForward  # of the first layer, as the norm is
    norm: LayerNorm


def plain_parts(stack: Stack | None) -> Plain:
    stack = narrow(Stack, stack)
    first = stack.layers[0]
    return Plain(stack, grouped_of(stack), narrow(FeedForward, first.feed_forward), narrow(LayerNorm, first.norm))
