"""The layers of a PagedDecoder: branches that read and write pages, and the norms and sums around them.

    layers = build_layers(network.decoder, storage.layers, num_positions=8192); x = run_layers(layers, x, step)

A step (paged_steps.py) says how a branch attends: DecodeStep has one new token of each sequence, PromptStep has packed
tokens, and SourceStep those of an encoder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from clearhead.architecture import Alibi, Experts, FeedForward, GroupedAttention, RelativeBuckets, Rope
from clearhead.backends.cuda.latent import LatentBranch, build_latent_branch
from clearhead.backends.cuda.launch import fused_linear, plain_linear
from clearhead.backends.cuda.mixture import MixtureBranch
from clearhead.backends.cuda.paged_launch import PagedAttention, activate, add_and_normalize
from clearhead.backends.cuda.paged_steps import Step
from clearhead.backends.lowering import LoweredAttention, lower_attention, rotation_table
from clearhead.backends.lowering_norms import NormModule
from clearhead.backends.lowering_projections import Projection, merge_projections
from clearhead.backends.lowering_scores import bucket_table
from clearhead.model import (
    Attention,
    Block,
    FeedForwardLayer,
    LatentAttentionLayer,
    LayerStack,
    MixtureLayer,
    Residual,
    alibi_slopes,
)

Table = tuple[Tensor, Tensor]


# --- branches


@dataclass(frozen=True)
class GroupedBranch:
    """Grouped attention with merged projections."""

    pages: PagedAttention
    query_key_value: Projection
    output: Projection

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Normalized x (T, D) -> (T, D)."""
        return linear(step.attend(linear(x, self.query_key_value), self.pages), self.output)

    def add_in_kernels(self, x: Tensor, residual: Residual, step: Step) -> None:
        """Add the branch with its norms to a few rows x (B, D) in place, with the products of triton_products.py."""
        projected = fused_linear(x, self.query_key_value, norm=cast(NormModule, residual.norm))
        _add_product(x, step.attend(projected, self.pages), self.output, residual.branch_norm)


@dataclass(frozen=True)
class CrossBranch:
    """Cross-attention of a decoder to the keys and values of its source."""

    pages: PagedAttention
    query: Projection
    output: Projection

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Normalized x (T, D) -> (T, D)."""
        return linear(step.attend_source(linear(x, self.query), self.pages), self.output)

    def add_in_kernels(self, x: Tensor, residual: Residual, step: Step) -> None:
        """Add the branch with its norms to a few rows x (B, D) in place, with the products of triton_products.py."""
        query = fused_linear(x, self.query, norm=cast(NormModule, residual.norm))
        _add_product(x, step.attend_source(query, self.pages), self.output, residual.branch_norm)


@dataclass(frozen=True)
class DenseBranch:
    """A feed-forward layer with merged projections."""

    gate_and_up: Projection
    down: Projection
    gated: bool
    activation: str

    def __call__(self, x: Tensor, step: Step | None) -> Tensor:
        """Normalized x (T, D) -> (T, D)."""
        if len(x) == 1:
            inner = fused_linear(x, self.gate_and_up, gated=self.gated, activation=self.activation)
            return fused_linear(inner, self.down)
        return linear(activate(linear(x, self.gate_and_up), self.gated, self.activation), self.down)

    def add_in_kernels(self, x: Tensor, residual: Residual, step: Step) -> None:
        """Add the branch with its norms to a few rows x (B, D) in place, with the products of triton_products.py."""
        norm = cast(NormModule, residual.norm)
        inner = fused_linear(x, self.gate_and_up, norm=norm, gated=self.gated, activation=self.activation)
        _add_product(x, inner, self.down, residual.branch_norm)


Branch = GroupedBranch | LatentBranch | CrossBranch | DenseBranch | MixtureBranch


@dataclass(frozen=True)
class PagedLayer:
    """A block as two or three branches with their norms."""

    placement: str
    attention: GroupedBranch | LatentBranch
    cross_attention: CrossBranch | None
    feed_forward: DenseBranch | MixtureBranch
    attention_residual: Residual
    cross_attention_residual: Residual | None
    feed_forward_residual: Residual | None  # None: parallel branches have one

    @property
    def branches(self) -> list[tuple[Branch, Residual]]:
        """The branches of a layer in which one follows the other."""
        assert self.feed_forward_residual is not None
        found: list[tuple[Branch, Residual]] = [(self.attention, self.attention_residual)]
        if self.cross_attention is not None and self.cross_attention_residual is not None:
            found.append((self.cross_attention, self.cross_attention_residual))
        return [*found, (self.feed_forward, self.feed_forward_residual)]

    @property
    def projections(self) -> list[Projection]:
        """The projections that run in the Triton kernels if they are packed."""
        found: list[Projection] = []
        if isinstance(self.attention, GroupedBranch):
            found += self.attention.query_key_value, self.attention.output
        if self.cross_attention is not None:
            found += self.cross_attention.query, self.cross_attention.output
        if isinstance(self.feed_forward, DenseBranch):
            found += self.feed_forward.gate_and_up, self.feed_forward.down
        return found


def build_layers(
    stack: LayerStack,
    pages: Mapping[int, Table],
    num_positions: int,
    source_pages: Mapping[int, Table] | None = None,
) -> list[PagedLayer]:
    """Merge the weights of all blocks; layers with the same rotation share its table.

    pages, source_pages: keys and values of each layer, of the sequences and, in an encoder-decoder, of their sources.
    """
    tables: dict[tuple[Rope, int], Table] = {}
    layers = []
    for number, block in enumerate(cast(list[Block], list(stack.layers))):
        cross = None
        if block.layer.cross_attention is not None:
            assert source_pages is not None
            cross = _build_cross_branch(cast(Attention, block.cross_attention), source_pages[number])
        layers.append(_build_layer(block, stack, pages[number], num_positions, tables, cross))
    return layers


def _build_layer(
    block: Block,
    stack: LayerStack,
    pages: Table,
    num_positions: int,
    tables: dict[tuple[Rope, int], Table],
    cross: CrossBranch | None,
) -> PagedLayer:
    config, device = block.layer.attention, pages[0].device
    table = _no_table(device)
    if isinstance(config.position, Rope):
        width = config.head_width if isinstance(config, GroupedAttention) else config.rotary_width
        kind = config.position, width
        tables[kind] = tables.get(kind) or rotation_table(config, num_positions, device)
        table = tables[kind]
    module = block.attention
    attention: GroupedBranch | LatentBranch
    if isinstance(module, LatentAttentionLayer):
        attention = build_latent_branch(module, pages, table, linear)
    else:
        assert isinstance(module, Attention)
        projection = merge_projections(module.query, module.key, module.value)
        lowered = lower_attention(module, stack.relative_bias)
        paged = PagedAttention(lowered, *pages, *table, *_score_bias(lowered, device))
        attention = GroupedBranch(paged, projection, merge_projections(module.output))
    is_parallel = block.layer.placement == "parallel"
    return PagedLayer(
        block.layer.placement,
        attention,
        cross,
        _build_feed_forward(block),
        block.attention_residual,
        None if cross is None else block.cross_attention_residual,
        None if is_parallel else block.feed_forward_residual,
    )


def _build_cross_branch(module: Attention, pages: Table) -> CrossBranch:
    lowered = build_cross_pages(module, pages)
    return CrossBranch(lowered, merge_projections(module.query), merge_projections(module.output))


def build_cross_pages(module: Attention, pages: Table) -> PagedAttention:
    """Return the settings of cross-attention, which knows no positions, with the pages of the sources."""
    device = pages[0].device
    return PagedAttention(lower_attention(module), *pages, *_no_table(device), *_no_table(device))


def _score_bias(attention: LoweredAttention, device: torch.device) -> Table:
    """Return what is added to the scores, and the bucket of each distance (PagedAttention)."""
    nothing, _ = _no_table(device)
    match attention.config.position:
        case Alibi() as alibi:
            slopes = alibi_slopes(attention.config.num_heads, alibi)
            return torch.tensor(slopes, dtype=torch.float32, device=device), nothing
        case RelativeBuckets() as config:
            assert attention.relative_bias is not None
            return attention.relative_bias.weight.detach(), bucket_table(config, device)
    return nothing, nothing


def _no_table(device: torch.device) -> Table:
    return torch.zeros(0, 0, device=device), torch.zeros(0, 0, device=device)


def _build_feed_forward(block: Block) -> DenseBranch | MixtureBranch:
    module, config = block.feed_forward, block.layer.feed_forward
    if isinstance(module, MixtureLayer):
        assert isinstance(config, Experts)
        shared = None
        if module.shared is not None and config.shared is not None:
            shared = partial(_build_dense(module.shared, config.shared), step=None)
        return MixtureBranch(module, shared)
    assert isinstance(module, FeedForwardLayer)
    assert isinstance(config, FeedForward)
    return _build_dense(module, config)


def _build_dense(module: FeedForwardLayer, config: FeedForward) -> DenseBranch:
    parts = (module.up,) if module.gate is None else (module.gate, module.up)
    return DenseBranch(merge_projections(*parts), merge_projections(module.down), config.gated, config.activation)


# --- running layers


def run_layers(layers: Sequence[PagedLayer], x: Tensor, step: Step) -> Tensor:
    """Run x (T, D) through all layers with PyTorch's products; a norm also adds the branch before it to x."""
    branch = None
    for layer in layers:
        if layer.feed_forward_residual is None:
            normed = add_and_normalize(x, branch, cast(NormModule, layer.attention_residual.norm))
            branch = layer.attention(normed, step) + layer.feed_forward(normed, step)
            continue
        for run, residual in layer.branches:
            norm = cast(NormModule, residual.norm)
            if layer.placement == "post":
                x, branch = add_and_normalize(x, run(x, step), norm), None
            else:
                branch = _normalize(run(add_and_normalize(x, branch, norm), step), residual.branch_norm)
    return x if branch is None else x.add_(branch)


def run_layers_in_kernels(layers: Sequence[PagedLayer], x: Tensor, step: Step) -> Tensor:
    """Run a few rows x (B, D) through all layers with the products of triton_products.py, in place."""
    for layer in layers:
        for run, residual in layer.branches:
            if isinstance(run, GroupedBranch | CrossBranch | DenseBranch):
                run.add_in_kernels(x, residual, step)
            else:
                normed = add_and_normalize(x, None, cast(NormModule, residual.norm))
                x += _normalize(run(normed, step), residual.branch_norm)
    return x


def linear(x: Tensor, projection: Projection) -> Tensor:
    """Return the product of x (T, K) with a projection (N, K): one row in the Triton kernel, more in PyTorch's."""
    if len(x) == 1:
        return fused_linear(x, projection)
    return plain_linear(x, projection)


def _normalize(branch: Tensor, norm: nn.Module) -> Tensor:
    """Apply the norm at the end of a branch of a sandwich block."""
    return branch if isinstance(norm, nn.Identity) else add_and_normalize(branch, None, cast(NormModule, norm))


def _add_product(x: Tensor, inner: Tensor, projection: Projection, branch_norm: nn.Module) -> None:
    """Add the last projection of a branch, and its norm in a sandwich block, to the residual stream x in place."""
    if isinstance(branch_norm, nn.Identity):
        fused_linear(inner, projection, residual=x)
    else:
        x += _normalize(fused_linear(inner, projection), branch_norm)
