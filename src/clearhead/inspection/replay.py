"""Recompute one block from its recorded input: its heads, what each branch adds, and its routing decisions.

    replay = BlockReplay(block, x, self_attention_context(stack, layer, inputs)); replay.heads(); replay.feed_forward

Each value is computed on first use. The norms are placed as in model/block.py:

    pre, sandwich   middle = x + attention (+ cross-attention)   output = middle + feed_forward
    post            middle = norm(x + attention) (likewise)      output = norm(middle + feed_forward)
    parallel        middle = x + attention                       output = middle + feed_forward, computed from norm(x)

The placement "branch" is like "sandwich", and "parallel_norms" like "parallel" with a norm for each branch.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import cast

from torch import Tensor, nn

from clearhead.errors import ClearheadError
from clearhead.inspection.attention_heads import AttentionHeads, capture_heads
from clearhead.inspection.recording import StackInputs
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
    """The experts that the router of one layer chose for each token, highest weight first."""

    experts: Tensor  # (T, num_chosen)
    weights: Tensor  # (T, num_chosen)


def self_attention_context(stack: LayerStack, layer: int, inputs: StackInputs) -> AttentionContext:
    """Return the attention context that the stack's forward pass gave to this layer."""
    positions, indices = resolve_positions(inputs.tokens, inputs.mask, inputs.positions, inputs.documents)
    dtype = stack.token_embedding.tokens.weight.dtype
    forward = ForwardContext(lambda pattern: indices, positions, stack.width, dtype, fused_attention, absorb=False)
    layer_config = stack.stack.layers[layer]
    return make_contexts([layer_config], forward, stack.relative_bias)[layer_config.attention]


def cross_attention_context(inputs: StackInputs, source: StackInputs) -> AttentionContext:
    """Return the context that the decoder's forward pass gave to its cross-attention layers."""
    return AttentionContext(
        cross_attention_mask(source.mask), fused_attention, positions_from_mask(inputs.tokens, inputs.mask)
    )


class BlockReplay:
    """Recompute parts of `block` for its input x (1, T, D); the results are (1, T, D) too.

    encoder_output (1, S, D) and cross_context are given for blocks with cross-attention.
    """

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

    def at(self, positions: Tensor) -> "BlockReplay":
        """Return a replay of some positions (n,) only, whose results are (1, n, D). They attend to all positions."""
        return _PositionsReplay(self, positions)

    def output(self) -> Tensor:
        """Return the residual stream after the block, computed by the block's own forward method."""
        return cast(Tensor, self.block(self.x, self.context, self.encoder_output, self.cross_context))

    def heads(self) -> AttentionHeads:
        """Return the queries, keys and values of self-attention."""
        return capture_heads(self.block.attention, self.attention_input, self.context)

    def cross_heads(self) -> AttentionHeads:
        """Return the queries, keys and values of cross-attention."""
        assert self.cross_context is not None
        x = _branch_input(self.block.cross_attention_residual, self.after_attention)
        return capture_heads(self.block.cross_attention, x, self.cross_context, self.encoder_output)

    @cached_property
    def attention_input(self) -> Tensor:
        return _branch_input(self.block.attention_residual, self.x)

    @cached_property
    def attention(self) -> Tensor:
        """What self-attention adds to the residual stream."""
        output = self.block.attention(self.attention_input, self.context)
        return self.block.attention_residual.normalize_and_scale(output)

    @cached_property
    def after_attention(self) -> Tensor:
        """The residual stream after self-attention, before cross-attention."""
        return add_branch(self.block.attention_residual, self.x, self.attention)

    @cached_property
    def cross_attention(self) -> Tensor:
        """What cross-attention adds to the residual stream."""
        residual = self.block.cross_attention_residual
        x = _branch_input(residual, self.after_attention)
        return residual.normalize_and_scale(self.block.cross_attention(x, self.cross_context, self.encoder_output))

    @cached_property
    def middle(self) -> Tensor:
        """The residual stream between attention and feed-forward."""
        if self.encoder_output is None:
            return self.after_attention
        return add_branch(self.block.cross_attention_residual, self.after_attention, self.cross_attention)

    @cached_property
    def feed_forward_input(self) -> Tensor:
        match self.block.layer.placement:
            case "parallel":
                return self.attention_input
            case "parallel_norms":
                return _branch_input(self.block.feed_forward_residual, self.x)
            case _:
                return _branch_input(self.block.feed_forward_residual, self.middle)

    @cached_property
    def feed_forward(self) -> Tensor:
        """What the feed-forward layer adds to the residual stream."""
        is_parallel = self.block.layer.placement == "parallel"
        residual = self.block.attention_residual if is_parallel else self.block.feed_forward_residual
        return residual.normalize_and_scale(self.block.feed_forward(self.feed_forward_input))

    def routing(self) -> Routing:
        """Return the experts chosen for each token. Raise ClearheadError if the layer has no router."""
        mixture = self.block.feed_forward
        if not isinstance(mixture, MixtureLayer):
            raise ClearheadError(
                "this layer has a single feed-forward and no router; use feed_forward_output(layer) instead"
            )
        weights, experts = cast(tuple[Tensor, Tensor], mixture.router(self.feed_forward_input[0]))
        weights, order = weights.sort(dim=-1, descending=True)
        return Routing(experts.gather(-1, order), weights)


class _PositionsReplay(BlockReplay):
    """Recompute some positions of a block: keys and values of all tokens, and everything else of these alone.

    Cross-attention is computed for all positions.
    """

    def __init__(self, full: BlockReplay, positions: Tensor):
        super().__init__(full.block, full.x[:, positions], full.context, full.encoder_output, full.cross_context)
        self.full, self.positions = full, positions

    def heads(self) -> AttentionHeads:
        """Return the queries of these positions, and the keys and values of all."""
        return self._heads

    @cached_property
    def _heads(self) -> AttentionHeads:
        return self.full.heads().select(None, self.positions)

    @cached_property
    def attention(self) -> Tensor:
        """What self-attention adds to the residual stream."""
        merged = self._heads.compute().output.transpose(1, 2).flatten(2)  # (1, n, N·H)
        project = cast(nn.Module, self.block.attention.output)
        return self.block.attention_residual.normalize_and_scale(project(merged))

    @cached_property
    def cross_attention(self) -> Tensor:
        """What cross-attention adds to the residual stream."""
        return self.full.cross_attention[:, self.positions]


def _branch_input(residual: Residual, x: Tensor) -> Tensor:
    """Return what the branch of a residual reads from the stream x: normalized unless the norm comes after."""
    return x if residual.placement == "post" else residual.norm(x)


def add_branch(residual: Residual, x: Tensor, branch_output: Tensor) -> Tensor:
    """Return the residual stream after a branch has added its output to x."""
    added: Tensor = x + branch_output
    if residual.placement == "post":
        added = residual.norm(added)
    return added
