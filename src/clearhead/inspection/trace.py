"""A trace: what one forward on the fast path left behind, and everything else computed from it when asked for.

    traced = trace(model, "The cat sat on the mat"); traced.attention(layer=3, head=2)   # (T, T), rows sum to 1

Kept are the tokens and the stream (T, D) before every √L-th block and after the last. What lies between, scores and
weights of one head, a branch's output, the logits are made anew by the network's own parts, for the layer, head and
rows asked for; what was made last is kept too, so that layer after layer costs one block each.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from clearhead.architecture import Layer, ModelConfig, Stack
from clearhead.errors import ClearheadError, unknown_name
from clearhead.inspection.heads import Heads, chosen, index
from clearhead.inspection.record import Inputs, resting, run
from clearhead.inspection.replay import BlockReplay, Routing, context_across, context_of
from clearhead.model import Block, LayerStack, Transformer

P = ParamSpec("P")
R = TypeVar("R")


def quiet(method: Callable[Concatenate["Trace", P], R]) -> Callable[Concatenate["Trace", P], R]:
    """Without gradient and dropout, whatever the network is doing otherwise."""

    @wraps(method)
    def quietly(self: "Trace", /, *arguments: P.args, **options: P.kwargs) -> R:
        with torch.no_grad(), nullcontext() if self.network is None else resting(self.network):
            return method(self, *arguments, **options)

    return quietly


@dataclass(frozen=True)
class Trace:
    """Layers, heads and rows count from 0, or from the end as -1. `stack` is the one that answers, unless named."""

    config: ModelConfig
    tokens: list[int]
    token_texts: list[str]
    states: dict[str, dict[int, Tensor]]  # by stack and depth: the stream (T, D) before that layer; L: after the last
    source_tokens: list[int] | None = None
    source_texts: list[str] | None = None
    heads: dict[str, list[Heads]] = field(default_factory=dict)  # by stack or "cross", where they were kept
    network: Transformer | None = None  # None: loaded without
    inputs: dict[str, Inputs] = field(default_factory=dict)  # by stack
    recent: dict[str, dict[int, Tensor]] = field(default_factory=dict)  # by stack: the stream that was made last

    def __repr__(self) -> str:
        source = "" if self.source_tokens is None else f" from {len(self.source_tokens)}"
        return f"Trace({len(self.tokens)} tokens{source}, {self.num_layers} layers)"

    def _repr_html_(self) -> str | None:
        from clearhead.inspection.output import notebook

        return notebook(self)

    @property
    def num_layers(self) -> int:
        """Of the stack that answers."""
        return self.num_layers_of(None)

    def num_layers_of(self, stack: str | None) -> int:
        return len(self.described_stack(stack).layers)

    def num_heads(self, layer: int = 0, stack: str | None = None) -> int:
        return self.described(layer, stack).attention.num_heads

    # --- attention

    @quiet
    def scores(
        self, layer: int, head: int | None = None, rows: Iterable[int] | None = None, stack: str | None = None
    ) -> Tensor:
        """(T, S), or (N, T, S) of all heads: scaled, capped and with their bias, before the mask."""
        heads = self.self_heads(layer, stack)
        return chosen(heads, head, rows).attended.scores[0, slice(None) if head is None else 0]

    @quiet
    def attention(
        self, layer: int, head: int | None = None, rows: Iterable[int] | None = None, stack: str | None = None
    ) -> Tensor:
        """(T, S), or (N, T, S) of all heads: where each token looks. Rows sum to 1."""
        heads = self.self_heads(layer, stack)
        return chosen(heads, head, rows).attended.weights[0, slice(None) if head is None else 0]

    @quiet
    def cross_attention(self, layer: int, head: int | None = None, rows: Iterable[int] | None = None) -> Tensor:
        """(T, S), or (N, T, S) of all heads: where each token of the decoder looks in the source."""
        return chosen(self.cross_heads(layer), head, rows).attended.weights[0, slice(None) if head is None else 0]

    @quiet
    def allowed(self, layer: int, stack: str | None = None) -> Tensor:
        """(T, S): True where a token may look."""
        heads = self.self_heads(layer, stack)
        return heads.allowed(torch.arange(heads.queries.shape[2]))

    @quiet
    def values(self, layer: int, head: int, stack: str | None = None) -> Tensor:
        """(S, H of values): what this head takes from each token it looks at."""
        heads = self.self_heads(layer, stack)
        return heads.values[0, heads.key_head(index("head", head, heads.num_heads))]

    @quiet
    def self_heads(self, layer: int, stack: str | None = None) -> Heads:
        stack, layer = self.place(layer, stack)
        return self.heads[stack][layer] if stack in self.heads else self.replay(layer, stack).heads()

    @quiet
    def cross_heads(self, layer: int) -> Heads:
        if not self.config.is_encoder_decoder:
            raise ClearheadError("this model has no cross-attention; attention(layer) shows how it looks at itself")
        _, layer = self.place(layer, "decoder")
        return self.heads["cross"][layer] if "cross" in self.heads else self.replay(layer, "decoder").cross_heads()

    # --- the stream and what is added to it

    @quiet
    def residual(self, layer: int, stack: str | None = None) -> Tensor:
        """(T, D): the stream before a layer; `num_layers`: after the last."""
        name = self.stack_name(stack)
        depth = index("layer", layer, self.num_layers_of(name) + 1, " (the last: after all layers)")
        known = self.recent.get(name, {}) | self.states[name]
        start = max(kept for kept in known if kept <= depth)
        stream = known[start]
        for between in range(start, depth):
            stream = self.replay_from(stream, between, name).output()[0]
        if depth not in self.states[name]:
            self.recent[name] = {depth: stream}
        return stream

    @quiet
    def middle(self, layer: int, stack: str | None = None) -> Tensor:
        """(T, D): the stream between attention and feed-forward."""
        return self.replay(layer, stack).middle[0]

    @quiet
    def attention_output(self, layer: int, stack: str | None = None) -> Tensor:
        """(T, D): what attention adds to the stream."""
        return self.replay(layer, stack).attention[0]

    @quiet
    def cross_attention_output(self, layer: int) -> Tensor:
        """(T, D): what the look at the source adds to the stream."""
        self.cross_heads(layer)
        return self.replay(layer, "decoder").cross_attention[0]

    @quiet
    def feed_forward(self, layer: int, stack: str | None = None) -> Tensor:
        """(T, D): what the feed-forward, or the mixture of experts, adds to the stream."""
        return self.replay(layer, stack).feed_forward[0]

    @quiet
    def router(self, layer: int, stack: str | None = None) -> Routing:
        """Which experts each token goes to, and their weights, both (T, num_chosen)."""
        return self.replay(layer, stack).routing()

    @property
    def logits(self) -> Tensor:
        """(T, V)."""
        return self.compute_logits(self.residual(self.num_layers))

    @quiet
    def compute_logits(self, states: Tensor) -> Tensor:
        """A stream (n, D) of the stack that answers, as if it were the last: (n, V)."""
        network = self.need_network()
        if network.head is None:
            raise ClearheadError(
                "this model has no vocabulary head, so no logits; residual(num_layers) holds its last states"
            )
        return network.compute_logits(self.layer_stack(None).final_norm(states))

    def logits_at(self, position: int) -> Tensor:
        """(V,)."""
        return self.compute_logits(self.residual(self.num_layers)[self.position(position)])

    @quiet
    def run_again(self, position: int, network: Transformer | None = None) -> Tensor:
        """The logits at one place (V,) from a new forward, of a network with a change in it where one is given."""
        position, network = self.position(position), network or self.need_network()
        source = self.inputs["encoder"] if self.config.is_encoder_decoder else None
        return network.compute_logits(run(network, self.inputs[self.stack_name(None)], source)[0, position])

    # --- how it is computed

    def replay(self, layer: int, stack: str | None = None) -> BlockReplay:
        """One block from its input."""
        name, layer = self.place(layer, stack)
        return self.replay_from(self.residual(layer, name), layer, name)

    def replay_from(self, stream: Tensor, layer: int, stack: str) -> BlockReplay:
        layers, inputs = self.layer_stack(stack), self.inputs[stack]
        block, x, context = cast(Block, layers.layers[layer]), stream[None], context_of(layers, layer, inputs)
        if block.layer.cross_attention is None:
            return BlockReplay(block, x, context)
        encoder_output = self.layer_stack("encoder").final_norm(self.residual(-1, "encoder")[None])
        return BlockReplay(block, x, context, encoder_output, context_across(inputs, self.inputs["encoder"]))

    def layer_stack(self, stack: str | None) -> LayerStack:
        return cast(LayerStack, getattr(self.need_network(), self.stack_name(stack)))

    def need_network(self) -> Transformer:
        if self.network is None:
            raise ClearheadError("this trace was loaded without its model; load it as Trace.load(path, model.network)")
        return self.network

    def described(self, layer: int, stack: str | None = None) -> Layer:
        name, layer = self.place(layer, stack)
        return self.described_stack(name).layers[layer]

    def described_stack(self, stack: str | None) -> Stack:
        return cast(Stack, getattr(self.config, self.stack_name(stack)))

    def place(self, layer: int, stack: str | None) -> tuple[str, int]:
        name = self.stack_name(stack)
        return name, index("layer", layer, self.num_layers_of(name))

    def position(self, position: int) -> int:
        return index("position", position, len(self.tokens))

    def stack_name(self, stack: str | None) -> str:
        if stack is None:
            return "encoder" if self.config.decoder is None else "decoder"
        if stack not in self.states:
            raise unknown_name("stack", stack, self.states)
        return stack

    @quiet
    def with_heads(self) -> "Trace":
        """The same with queries, keys and values of all layers kept: quicker to ask, and saved as they are."""
        heads = {
            name: [self.self_heads(layer, name) for layer in range(self.num_layers_of(name))] for name in self.states
        }
        if self.config.is_encoder_decoder:
            heads["cross"] = [self.cross_heads(layer) for layer in range(self.num_layers)]
        return replace(self, heads=heads)

    # --- on disk

    def save(self, path: str | Path) -> Path:
        """One safetensors file: the streams, every layer's queries, keys and values, and the rest as JSON in it."""
        from clearhead.inspection.saved import save_trace

        return save_trace(self, Path(path))

    @staticmethod
    def load(path: str | Path, network: Transformer | None = None) -> "Trace":
        """Attention, values and streams are in the file; for what branches add and for logits give the network."""
        from clearhead.inspection.saved import load_trace

        return load_trace(Path(path), network)
