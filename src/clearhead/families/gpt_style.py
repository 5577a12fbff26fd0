"""Parts shared by GPT, BERT, BLOOM, MPT, BART and the Transformer of 2017.

    layers = make_layers([multi_head_attention(768, 12)] * 12, feed_forward, norm); parts = stack_parts(stack)

All have multi-head attention, ungated feed-forward layers and LayerNorm.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from clearhead.architecture import FeedForward, GroupedAttention, Layer, LayerNorm, Stack
from clearhead.errors import ClearheadError
from clearhead.families.family import grouped_attentions, require_type
from clearhead.families.tensor_rules import Copy, NameTable

# The module that scores tokens has another name than the one that scores texts, which has no bias.
_BIAS = "classifier.scores.bias"
TOKEN_CLASSIFIER_NAMES: NameTable = {
    "score.weight": Copy(("classifier.scores.weight",), only_without=_BIAS),
    "classifier.weight": Copy(("classifier.scores.weight",), only_with=_BIAS),
    "classifier.bias": _BIAS,
}


def multi_head_attention(
    width: int, num_heads: int, *, input_bias: bool = True, output_bias: bool = True, **options: Any
) -> GroupedAttention:
    """Return attention whose heads divide the width among them; `options` go to GroupedAttention."""
    if num_heads < 1 or width % num_heads:
        raise ClearheadError(
            f"the width {width} cannot be divided among {num_heads} heads; use a number of heads that divides it"
        )
    return GroupedAttention(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_width=width // num_heads,
        input_bias=input_bias,
        output_bias=output_bias,
        **options,
    )


def make_layers(
    attentions: Iterable[GroupedAttention],
    feed_forward: FeedForward,
    norm: LayerNorm,
    placement: Literal["pre", "post"] = "pre",
) -> tuple[Layer, ...]:
    """Return one layer for each attention, all with the same feed-forward and norm."""
    return tuple(
        Layer(attention=attention, feed_forward=feed_forward, norm=norm, placement=placement)
        for attention in attentions
    )


@dataclass(frozen=True)
class StackParts:
    """The parts of a stack that `write_config` needs."""

    stack: Stack
    attentions: list[GroupedAttention]  # one for each layer
    feed_forward: FeedForward  # of the first layer
    norm: LayerNorm  # of the first layer


def stack_parts(stack: Stack | None) -> StackParts:
    """Return the parts of a stack; raise ClearheadError if one has another type than these families use."""
    stack = require_type(Stack, stack)
    first = stack.layers[0]
    return StackParts(
        stack=stack,
        attentions=grouped_attentions(stack),
        feed_forward=require_type(FeedForward, first.feed_forward),
        norm=require_type(LayerNorm, first.norm),
    )
