"""One Transformer block: attention, cross-attention in a decoder with an encoder, and feed-forward (book C1).

    block = Block(layer, width=64, dropout=Dropout()); x = block(x, context)

The placement determines where the norms n are applied. A is attention and F the feed-forward branch; dropout follows
each branch:

    pre                 post                sandwich                 branch
    x = x + A(n(x))     x = n(x + A(x))     x = x + n'(A(n(x)))      x = x + n(A(x))
    x = x + F(n(x))     x = n(x + F(x))     x = x + n'(F(n(x)))      x = x + n(F(x))

    parallel                       parallel_norms
    h = n(x)                       x = x + A(n(x)) + F(n'(x))
    x = x + A(h) + F(h)

Each residual has its own norms. Cross-attention is a third branch between A and F, of the same form. The config's
`branch_scale` multiplies what a branch adds.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from clearhead.architecture import Dropout, Experts, FeedForward, GroupedAttention, LatentAttention, Layer
from clearhead.model.attention import Attention
from clearhead.model.context import AttentionContext, KeyValue
from clearhead.model.feed_forward import FeedForwardLayer
from clearhead.model.latent_attention import LatentAttentionLayer
from clearhead.model.mixture import MixtureLayer
from clearhead.model.norms import build_norm


def _build_attention(config: GroupedAttention | LatentAttention, width: int, dropout: float) -> nn.Module:
    match config:
        case GroupedAttention():
            return Attention(config, width, dropout)
        case LatentAttention():
            return LatentAttentionLayer(config, width, dropout)


def _build_feed_forward(config: FeedForward | Experts, width: int, dropout: float) -> nn.Module:
    match config:
        case FeedForward():
            return FeedForwardLayer(config, width, dropout)
        case Experts():
            return MixtureLayer(config, width, dropout)


class Residual(nn.Module):
    """Add the output of a branch to the residual stream, with the norms that the layer's placement asks for."""

    def __init__(self, layer: Layer, width: int, dropout: float):
        super().__init__()
        self.placement, self.scale = layer.placement, layer.branch_scale
        self.norm = nn.Identity() if layer.placement == "branch" else build_norm(layer.norm, width)
        has_branch_norm = layer.placement in ("sandwich", "branch")
        self.branch_norm = build_norm(layer.norm, width) if has_branch_norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        if self.placement == "post":
            return self.norm(x + self.dropout(self.normalize_and_scale(branch(x))))
        return x + self.run_branch(x, branch)

    def run_branch(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what a branch adds to the residual stream x, unless the norm follows the sum: (B, T, D)."""
        return self.dropout(self.normalize_and_scale(branch(self.norm(x))))

    def normalize_and_scale(self, branch_output: Tensor) -> Tensor:
        """Return the output of a branch as it is added to the residual stream."""
        normed: Tensor = self.branch_norm(branch_output)
        return normed if self.scale == 1.0 else normed * self.scale


class Block(nn.Module):
    """One layer of a stack."""

    def __init__(self, layer: Layer, width: int, dropout: Dropout):
        super().__init__()
        self.layer = layer
        self.attention = _build_attention(layer.attention, width, dropout.attention)
        self.attention_residual = Residual(layer, width, dropout.residual)
        if not layer.attention_norm:
            self.attention_residual.norm = nn.Identity()
        if layer.cross_attention is not None:
            self.cross_attention = _build_attention(layer.cross_attention, width, dropout.attention)
            self.cross_attention_residual = Residual(layer, width, dropout.residual)
        self.feed_forward = _build_feed_forward(layer.feed_forward, width, dropout.activation)
        if layer.placement != "parallel":  # there attention_residual is also that of the feed-forward branch
            self.feed_forward_residual = Residual(layer, width, dropout.residual)

    def forward(
        self,
        x: Tensor,
        context: AttentionContext,
        encoder_output: Tensor | KeyValue | None = None,
        cross_context: AttentionContext | None = None,
    ) -> Tensor:
        """x (B, T, D) -> (B, T, D).

        encoder_output: hidden states (B, S, D) of the encoder, or this layer's keys and values computed from them.
        """
        if self.layer.placement == "parallel":
            return self.attention_residual(x, lambda h: self.attention(h, context) + self.feed_forward(h))
        if self.layer.placement == "parallel_norms":
            after_attention = self.attention_residual(x, partial(self.attention, context=context))
            return after_attention + self.feed_forward_residual.run_branch(x, self.feed_forward)
        x = self.attention_residual(x, partial(self.attention, context=context))
        if encoder_output is not None:
            attend = partial(self.cross_attention, context=cross_context, encoder_output=encoder_output)
            x = self.cross_attention_residual(x, attend)
        return self.feed_forward_residual(x, self.feed_forward)
