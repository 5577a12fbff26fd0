"""The layers of a PagedDecoder: branches that read and write pages, and the norms and sums around them.

    layers = build_layers(network, storage, num_positions=8192); x = run_layers(layers, x, step)

A step says how a branch attends: DecodeStep has one new token of each sequence, PromptStep has packed tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.architecture import Alibi, Experts, FeedForward, GroupedAttention, Rope
from clearhead.backends.cuda.latent import LatentBranch, LatentPages, attend_latent, build_latent_branch, store_latent
from clearhead.backends.cuda.launch import fused_linear
from clearhead.backends.cuda.mixture import MixtureBranch
from clearhead.backends.cuda.paged_launch import (
    PagedAttention,
    QueryBlocks,
    activate,
    add_and_normalize,
    attend_chunks,
    attend_pages,
    paged_workspace,
)
from clearhead.backends.cuda.seats import Seats
from clearhead.backends.lowering import lower_attention, rotation_table
from clearhead.backends.lowering_norms import NormModule
from clearhead.backends.lowering_projections import Projection, merge_projections
from clearhead.cache import PackedLayout, PageStorage
from clearhead.model import (
    Attention,
    Block,
    FeedForwardLayer,
    LatentAttentionLayer,
    MixtureLayer,
    Residual,
    Transformer,
    alibi_slopes,
)

Table = tuple[Tensor, Tensor]


# --- steps


@dataclass
class DecodeStep:
    """One new token of each active seat."""

    seats: Seats
    num_rows: int
    workspaces: dict[tuple[int, int, int], Table] = field(default_factory=dict)

    def attend(self, projected: Tensor, pages: PagedAttention) -> Tensor:
        """Attend with queries, keys and values side by side (B, (N + 2K) H) -> (B, N H)."""
        config = pages.attention.config
        sizes = config.num_heads, config.num_kv_heads, config.head_width
        if sizes not in self.workspaces:  # in the first run, which is not captured
            self.workspaces[sizes] = paged_workspace(pages.attention, self.num_rows, projected.device)
        return attend_pages(projected, pages, self.seats, self.workspaces[sizes])

    def attend_latent(self, queries: Table, compressed: Tensor, pages: LatentPages) -> Tensor:
        """Attend to latents: queries (N, B, R) and (B, N, rotary), compressed (B, R + rotary) -> (N, B, R)."""
        store_latent(compressed, pages, seats=self.seats)
        return attend_latent(queries, pages, seats=self.seats)


@dataclass
class PromptStep:
    """Packed tokens of some sequences."""

    layout: PackedLayout

    def attend(self, projected: Tensor, pages: PagedAttention) -> Tensor:
        """Attend with queries, keys and values side by side (T, (N + 2K) H) -> (T, N H)."""
        config = pages.attention.config
        return attend_chunks(projected, pages, self.layout, self._blocks(config.num_heads // config.num_kv_heads))

    def attend_latent(self, queries: Table, compressed: Tensor, pages: LatentPages) -> Tensor:
        """Attend to latents: queries (N, T, R) and (T, N, rotary), compressed (T, R + rotary) -> (N, T, R)."""
        store_latent(compressed, pages, layout=self.layout)
        blocks = self._blocks(pages.heads_per_program, num_rows=32)
        return attend_latent(queries, pages, layout=self.layout, blocks=blocks)

    @cached_property
    def _known_blocks(self) -> dict[tuple[int, int], QueryBlocks]:
        return {}

    def _blocks(self, group: int, num_rows: int = 64) -> QueryBlocks:
        """Return the blocks of queries, computed once for all layers with equal groups."""
        if (group, num_rows) not in self._known_blocks:
            self._known_blocks[group, num_rows] = QueryBlocks.from_layout(self.layout, group, num_rows)
        return self._known_blocks[group, num_rows]


Step = DecodeStep | PromptStep


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
class DenseBranch:
    """A feed-forward layer with merged projections."""

    gate_and_up: Projection
    down: Projection
    gated: bool
    activation: str

    def __call__(self, x: Tensor, step: Step | None) -> Tensor:
        """Normalized x (T, D) -> (T, D)."""
        return linear(activate(linear(x, self.gate_and_up), self.gated, self.activation), self.down)

    def add_in_kernels(self, x: Tensor, residual: Residual, step: Step) -> None:
        """Add the branch with its norms to a few rows x (B, D) in place, with the products of triton_products.py."""
        norm = cast(NormModule, residual.norm)
        inner = fused_linear(x, self.gate_and_up, norm=norm, gated=self.gated, activation=self.activation)
        _add_product(x, inner, self.down, residual.branch_norm)


Branch = GroupedBranch | LatentBranch | DenseBranch | MixtureBranch


@dataclass(frozen=True)
class PagedLayer:
    """A block as two branches with their norms."""

    placement: str
    attention: GroupedBranch | LatentBranch
    feed_forward: DenseBranch | MixtureBranch
    attention_residual: Residual
    feed_forward_residual: Residual | None  # None: parallel branches have one

    @property
    def branches(self) -> list[tuple[Branch, Residual]]:
        """The branches of a layer in which one follows the other."""
        assert self.feed_forward_residual is not None
        return [(self.attention, self.attention_residual), (self.feed_forward, self.feed_forward_residual)]

    @property
    def projections(self) -> list[Projection]:
        """The projections that run in the Triton kernels if they are packed."""
        found: list[Projection] = []
        if isinstance(self.attention, GroupedBranch):
            found += self.attention.query_key_value, self.attention.output
        if isinstance(self.feed_forward, DenseBranch):
            found += self.feed_forward.gate_and_up, self.feed_forward.down
        return found


def build_layers(network: Transformer, storage: PageStorage, num_positions: int) -> list[PagedLayer]:
    """Merge the weights of all blocks; layers with the same rotation share its table."""
    tables: dict[tuple[Rope, int], Table] = {}
    assert network.decoder is not None
    blocks = cast(list[Block], list(network.decoder.layers))
    return [_build_layer(block, storage.layers[n], num_positions, tables) for n, block in enumerate(blocks)]


def _build_layer(block: Block, pages: Table, num_positions: int, tables: dict[tuple[Rope, int], Table]) -> PagedLayer:
    config = block.layer.attention
    table = torch.zeros(0, 0, device=pages[0].device), torch.zeros(0, 0, device=pages[0].device)
    if isinstance(config.position, Rope):
        width = config.head_width if isinstance(config, GroupedAttention) else config.rotary_width
        kind = config.position, width
        tables[kind] = tables.get(kind) or rotation_table(config, num_positions, pages[0].device)
        table = tables[kind]
    module = block.attention
    attention: GroupedBranch | LatentBranch
    if isinstance(module, LatentAttentionLayer):
        attention = build_latent_branch(module, pages, table, linear)
    else:
        assert isinstance(module, Attention)
        projection = merge_projections(module.query, module.key, module.value)
        slopes = alibi_slopes(config.num_heads, config.position) if isinstance(config.position, Alibi) else []
        slope_column = torch.tensor(slopes, dtype=torch.float32, device=pages[0].device)
        lowered = PagedAttention(lower_attention(module), *pages, *table, slope_column)
        attention = GroupedBranch(lowered, projection, merge_projections(module.output))
    is_parallel = block.layer.placement == "parallel"
    return PagedLayer(
        block.layer.placement,
        attention,
        _build_feed_forward(block),
        block.attention_residual,
        None if is_parallel else block.feed_forward_residual,
    )


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
            if isinstance(run, GroupedBranch | DenseBranch):
                run.add_in_kernels(x, residual, step)
            else:
                normed = add_and_normalize(x, None, cast(NormModule, residual.norm))
                x += _normalize(run(normed, step), residual.branch_norm)
    return x


def linear(x: Tensor, projection: Projection) -> Tensor:
    """Return the product of x (T, K) with a projection (N, K): one row in the Triton kernel, more in PyTorch's."""
    if len(x) == 1:
        return fused_linear(x, projection)
    return functional.linear(x, projection.plain_weight(x.dtype), projection.bias)


def _normalize(branch: Tensor, norm: nn.Module) -> Tensor:
    """Apply the norm at the end of a branch of a sandwich block."""
    return branch if isinstance(norm, nn.Identity) else add_and_normalize(branch, None, cast(NormModule, norm))


def _add_product(x: Tensor, inner: Tensor, projection: Projection, branch_norm: nn.Module) -> None:
    """Add the last projection of a branch, and its norm in a sandwich block, to the residual stream x in place."""
    if isinstance(branch_norm, nn.Identity):
        fused_linear(inner, projection, residual=x)
    else:
        x += _normalize(fused_linear(inner, projection), branch_norm)
