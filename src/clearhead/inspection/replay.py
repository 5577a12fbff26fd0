"""One block again, from the input that was kept of it: its heads, what each branch adds, where a router sends.

    replay = BlockReplay(block, x, context_of(stack, layer, inputs)); replay.heads(); replay.feed_forward

Each piece is computed when it is first asked for. The placement of norms is that of model/block.py:

    pre, sandwich   middle = x + attention (+ cross)          output = middle + feed_forward
    post            middle = norm(x + attention) (the same)   output = norm(middle + feed_forward)
    parallel        middle = x + attention                    output = middle + feed_forward, which does not read it
"""

from dataclasses import dataclass
from functools import cached_property
from typing import cast

from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.inspection.heads import Heads, hear
from clearhead.inspection.record import Inputs
from clearhead.model import (
    AttentionContext,
    Block,
    ForwardContext,
    LayerStack,
    MixtureLayer,
    Residual,
    cross_attention_mask,
    fused_attention,
    make_contexts,
    positions_from_mask,
    resolve_positions,
)


@dataclass(frozen=True)
class Routing:
    """Where the router of one layer sends each token, best first."""

    experts: Tensor  # (T, num_chosen)
    weights: Tensor  # (T, num_chosen)


def context_of(stack: LayerStack, layer: int, inputs: Inputs) -> AttentionContext:
    """What the stack's forward told the attention of this layer."""
    positions, grid = resolve_positions(inputs.tokens, inputs.mask, inputs.positions, inputs.documents)
    dtype = stack.embedding.tokens.weight.dtype
    forward = ForwardContext(lambda pattern: grid, positions, stack.width, dtype, fused_attention, absorb=False)
    described = stack.stack.layers[layer]
    return make_contexts([described], forward, stack.relative_bias)[described.attention]


def context_across(inputs: Inputs, source: Inputs) -> AttentionContext:
    return AttentionContext(
        cross_attention_mask(source.mask), fused_attention, positions_from_mask(inputs.tokens, inputs.mask)
    )


class BlockReplay:
    """x (1, T, D), memory (1, S, D) where the block looks across; what comes out is (1, T, D) too."""

    def __init__(
        self,
        block: Block,
        x: Tensor,
        context: AttentionContext,
        encoder_output: Tensor | None = None,
        cross_context: AttentionContext | None = None,
    ):
        self.block, self.x, self.context = block, x, context
        self.encoder_output, self.cross_context = encoder_output, cross_context

    def output(self) -> Tensor:
        """The stream after the block, as its own forward makes it."""
        return cast(Tensor, self.block(self.x, self.context, self.encoder_output, self.cross_context))

    @cached_property
    def normed(self) -> Tensor:
        return read(self.block.attention_residual, self.x)

    def heads(self) -> Heads:
        return hear(self.block.attention, self.normed, self.context)

    def cross_heads(self) -> Heads:
        assert self.cross_context is not None
        x = read(self.block.cross_attention_residual, self.after_attention)
        return hear(self.block.cross_attention, x, self.cross_context, self.encoder_output)

    @cached_property
    def attention(self) -> Tensor:
        """What attention adds to the stream."""
        return self.block.attention_residual.branch_norm(self.block.attention(self.normed, self.context))

    @cached_property
    def after_attention(self) -> Tensor:
        return join(self.block.attention_residual, self.x, self.attention)

    @cached_property
    def cross_attention(self) -> Tensor:
        residual = self.block.cross_attention_residual
        x = read(residual, self.after_attention)
        return residual.branch_norm(self.block.cross_attention(x, self.cross_context, self.encoder_output))

    @cached_property
    def middle(self) -> Tensor:
        """The stream between attention and feed-forward."""
        if self.encoder_output is None:
            return self.after_attention
        return join(self.block.cross_attention_residual, self.after_attention, self.cross_attention)

    @cached_property
    def feed_forward_input(self) -> Tensor:
        return self.normed if self.is_parallel else read(self.block.feed_forward_residual, self.middle)

    @cached_property
    def feed_forward(self) -> Tensor:
        """What the feed-forward adds to the stream."""
        out = self.block.feed_forward(self.feed_forward_input)
        return out if self.is_parallel else self.block.feed_forward_residual.branch_norm(out)

    @property
    def is_parallel(self) -> bool:
        return self.block.layer.placement == "parallel"

    def routing(self) -> Routing:
        mixture = self.block.feed_forward
        if not isinstance(mixture, MixtureLayer):
            raise ClearheadError("this layer has one feed-forward and no router; feed_forward(layer) shows it")
        weights, experts = cast(tuple[Tensor, Tensor], mixture.router(self.feed_forward_input[0]))
        weights, order = weights.sort(dim=-1, descending=True)
        return Routing(experts.gather(-1, order), weights)


def read(residual: Residual, x: Tensor) -> Tensor:
    """What a branch is given of the stream."""
    return x if residual.placement == "post" else residual.norm(x)


def join(residual: Residual, x: Tensor, added: Tensor) -> Tensor:
    joined: Tensor = x + added
    if residual.placement == "post":
        joined = residual.norm(joined)
    return joined
