"""A trace: the record of one forward pass, and everything that can be computed from it on request.

    traced = model.trace("The cat sat on the mat"); traced.attention(layer=3, head=2)   # (T, T), rows sum to 1

A trace keeps the tokens and the residual stream (T, D) before every √L-th block and after the last. The streams in
between, the scores and weights of a head, the output of a branch and the logits are recomputed by the network's own
modules for the requested layer, head and rows. The last recomputed stream is kept too, so that reading all layers in
order costs one block each.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.files import check_output_path
from clearhead.inspection.attention_heads import AttentionHeads, check_index, select_heads
from clearhead.inspection.notebook import notebook_html
from clearhead.inspection.recording import evaluation_mode, run_network
from clearhead.inspection.replay import BlockReplay, Routing, cross_attention_context, self_attention_context
from clearhead.inspection.trace_file import load_record, save_record
from clearhead.inspection.trace_record import TraceRecord
from clearhead.inspection.views import AttentionView, compute_matrices
from clearhead.model import Block, LayerStack, Transformer

P = ParamSpec("P")
R = TypeVar("R")


def inference(method: Callable[Concatenate["Trace", P], R]) -> Callable[Concatenate["Trace", P], R]:
    """Decorate a method of Trace to run without gradients and dropout, even while the network is being trained."""

    @wraps(method)
    def run(self: "Trace", /, *arguments: P.args, **options: P.kwargs) -> R:
        with torch.no_grad(), nullcontext() if self.network is None else evaluation_mode(self.network):
            return method(self, *arguments, **options)

    return run


@dataclass(frozen=True, repr=False)
class Trace(TraceRecord):
    """The record of one forward pass over one sequence, and what is computed from it.

    Layers, heads, rows and positions count from 0, or from the end if negative. `stack` is "encoder" or "decoder";
    None means the decoder, or the encoder of an encoder-only model.
    """

    network: Transformer | None = None  # None: loaded from a file without the network
    recomputed: dict[str, dict[int, Tensor]] = field(default_factory=dict)  # by stack: the last recomputed residual

    def __repr__(self) -> str:
        source = "" if self.source_tokens is None else f" after {len(self.source_tokens)} source tokens"
        heads = "heads kept" if self.heads else "heads recomputed on request"
        return f"Trace({self.heading!r}, {len(self.tokens)} tokens{source}, {self.num_layers} layers, {heads})"

    def _repr_html_(self) -> str | None:
        return notebook_html(self.attention_views(), self.heading, self.size)

    # --- attention

    @inference
    def scores(
        self, layer: int, head: int | None = None, rows: Iterable[int] | None = None, stack: str | None = None
    ) -> Tensor:
        """Return the scores (T, S) of one head, or (N, T, S) of all: scaled, capped and biased, before the mask.

        rows: the query positions to compute; None computes all.
        """
        heads = self.self_heads(layer, stack)
        return select_heads(heads, head, rows).compute().scores[0, slice(None) if head is None else 0]

    @inference
    def attention(
        self, layer: int, head: int | None = None, rows: Iterable[int] | None = None, stack: str | None = None
    ) -> Tensor:
        """Return the attention weights (T, S) of one head, or (N, T, S) of all. Each row sums to 1.

        rows: the query positions to compute; None computes all.
        """
        heads = self.self_heads(layer, stack)
        return select_heads(heads, head, rows).compute().weights[0, slice(None) if head is None else 0]

    @inference
    def cross_attention(self, layer: int, head: int | None = None, rows: Iterable[int] | None = None) -> Tensor:
        """Return the weights (T, S) of one head, or (N, T, S) of all, from decoder tokens to source tokens."""
        weights = select_heads(self.cross_heads(layer), head, rows).compute().weights
        return weights[0, slice(None) if head is None else 0]

    @inference
    def allowed(self, layer: int, stack: str | None = None) -> Tensor:
        """Return the attention mask (T, S): True where a query may attend to a key."""
        heads = self.self_heads(layer, stack)
        return heads.allowed(torch.arange(heads.queries.shape[2]))

    @inference
    def values(self, layer: int, head: int, stack: str | None = None) -> Tensor:
        """Return the value vectors of one head, (S, H), where H is the width of a value."""
        heads = self.self_heads(layer, stack)
        return heads.values[0, heads.key_value_head(check_index("head", head, heads.num_heads))]

    @inference
    def self_heads(self, layer: int, stack: str | None = None) -> AttentionHeads:
        """Return the queries, keys and values of a self-attention layer."""
        stack, layer = self.resolve_layer(layer, stack)
        return self.heads[stack][layer] if stack in self.heads else self.replay(layer, stack).heads()

    @inference
    def cross_heads(self, layer: int) -> AttentionHeads:
        """Return the queries, keys and values of a cross-attention layer."""
        if not self.config.is_encoder_decoder:
            raise ClearheadError("this model has no cross-attention; use attention(layer) for its self-attention")
        _, layer = self.resolve_layer(layer, "decoder")
        return self.heads["cross"][layer] if "cross" in self.heads else self.replay(layer, "decoder").cross_heads()

    # --- the residual stream and what is added to it

    @inference
    def residual(self, layer: int, stack: str | None = None) -> Tensor:
        """Return the residual stream (T, D) before a layer; `num_layers` selects the stream after the last layer."""
        name = self.resolve_stack(stack)
        depth = check_index("layer", layer, self.num_layers_of(name) + 1, " (the last one: after all layers)")
        known = self.recomputed.get(name, {}) | self.residuals[name]
        start = max(known_depth for known_depth in known if known_depth <= depth)
        stream = known[start]
        for between in range(start, depth):
            stream = self.replay_from(stream, between, name).output()[0]
        if depth not in self.residuals[name]:
            self.recomputed[name] = {depth: stream}
        return stream

    @inference
    def residual_middle(self, layer: int, stack: str | None = None, positions: Tensor | None = None) -> Tensor:
        """Return the residual stream (T, D) between attention and feed-forward; at some positions if they are given."""
        replay = self.replay(layer, stack)
        return (replay if positions is None else replay.at(positions)).middle[0]

    @inference
    def attention_output(self, layer: int, stack: str | None = None) -> Tensor:
        """Return what self-attention adds to the residual stream (T, D)."""
        return self.replay(layer, stack).attention[0]

    @inference
    def cross_attention_output(self, layer: int) -> Tensor:
        """Return what cross-attention adds to the residual stream (T, D)."""
        self.cross_heads(layer)
        return self.replay(layer, "decoder").cross_attention[0]

    @inference
    def feed_forward_output(self, layer: int, stack: str | None = None) -> Tensor:
        """Return what the feed-forward layer, or the mixture of experts, adds to the residual stream (T, D)."""
        return self.replay(layer, stack).feed_forward[0]

    @inference
    def routing(self, layer: int, stack: str | None = None) -> Routing:
        """Return the experts chosen for each token and their weights, both (T, num_chosen)."""
        return self.replay(layer, stack).routing()

    @property
    def logits(self) -> Tensor:
        """The logits of every position (T, V)."""
        return self.compute_logits(self.residual(self.num_layers))

    @inference
    def compute_logits(self, states: Tensor) -> Tensor:
        """Apply the final norm and the vocabulary head to residual states (n, D); return the logits (n, V)."""
        network = self.require_network()
        if network.head is None:
            raise ClearheadError(
                "this model has no vocabulary head, so it has no logits; residual(num_layers) returns its last states"
            )
        return network.compute_logits(self.layer_stack(None).final_norm(states))

    def logits_at(self, position: int) -> Tensor:
        """Return the logits (V,) of one position."""
        return self.compute_logits(self.residual(self.num_layers)[self.resolve_position(position)])

    @inference
    def rerun(self, position: int, network: Transformer | None = None) -> Tensor:
        """Run a new forward pass on the same inputs and return the logits (V,) of one position.

        network: a modified copy of the traced network, as `with_intervention` makes; None runs the original.
        """
        position, network = self.resolve_position(position), network or self.require_network()
        source = self.inputs["encoder"] if self.config.is_encoder_decoder else None
        return network.compute_logits(run_network(network, self.inputs[self.resolve_stack(None)], source)[0, position])

    # --- recomputation

    def replay(self, layer: int, stack: str | None = None) -> BlockReplay:
        """Return a replay of one block from its input in this trace."""
        name, layer = self.resolve_layer(layer, stack)
        return self.replay_from(self.residual(layer, name), layer, name)

    def replay_from(self, stream: Tensor, layer: int, stack: str) -> BlockReplay:
        """Return a replay of one block from the residual stream (T, D) before it."""
        layers, inputs = self.layer_stack(stack), self.inputs[stack]
        block, x, context = (
            cast(Block, layers.layers[layer]),
            stream[None],
            self_attention_context(layers, layer, inputs),
        )
        if block.layer.cross_attention is None:
            return BlockReplay(block, x, context)
        encoder_output = self.layer_stack("encoder").final_norm(self.residual(-1, "encoder")[None])
        return BlockReplay(block, x, context, encoder_output, cross_attention_context(inputs, self.inputs["encoder"]))

    def layer_stack(self, stack: str | None) -> LayerStack:
        """Return a stack of the network."""
        return cast(LayerStack, getattr(self.require_network(), self.resolve_stack(stack)))

    def require_network(self) -> Transformer:
        """Return the network. Raise ClearheadError if the trace was loaded without it."""
        if self.network is None:
            raise ClearheadError(
                "this trace was loaded without its model; load it with Trace.load(path, model.network)"
            )
        return self.network

    @inference
    def with_heads(self) -> "Trace":
        """Return a trace that keeps the queries, keys and values of all layers instead of recomputing them."""
        stacks = self.residuals
        heads = {name: [self.self_heads(layer, name) for layer in range(self.num_layers_of(name))] for name in stacks}
        if self.config.is_encoder_decoder:
            heads["cross"] = [self.cross_heads(layer) for layer in range(self.num_layers)]
        return replace(self, heads=heads)

    # --- display and files

    def attention_views(self) -> list[AttentionView]:
        """Return the attention to display: that of the decoder, cross- and encoder attention, or the only one."""

        def self_attention(title: str, texts: list[str], stack: str | None) -> AttentionView:
            num_heads = [self.num_heads(layer, stack) for layer in range(self.num_layers_of(stack))]
            return AttentionView(
                title,
                texts,
                texts,
                num_heads,
                lambda layer, head: compute_matrices(self.self_heads(layer, stack), head),
            )

        if self.source_texts is None:
            return [self_attention("self-attention", self.token_texts, None)]
        decoder = self_attention("decoder self-attention", self.token_texts, "decoder")
        cross = AttentionView(
            "cross-attention",
            self.token_texts,
            self.source_texts,
            decoder.num_heads,
            lambda layer, head: compute_matrices(self.cross_heads(layer), head),
        )
        return [decoder, cross, self_attention("encoder self-attention", self.source_texts, "encoder")]

    def save(self, path: str | Path) -> Path:
        """Save the residual streams and all queries, keys and values as one safetensors file; return its path."""
        check_output_path(Path(path), [".safetensors"])
        traced = self if self.heads else self.with_heads()
        residuals = {
            name: {depth: traced.residual(depth, name) for depth in range(self.num_layers_of(name) + 1)}
            for name in self.residuals
        }
        return save_record(replace(traced, residuals=residuals), Path(path))

    @staticmethod
    def load(path: str | Path, network: Transformer | None = None) -> "Trace":
        """Load a saved trace.

        The file has the attention, the values and the residual streams; branch outputs and logits need the network.
        """
        return Trace(**vars(load_record(Path(path), network)), network=network)
