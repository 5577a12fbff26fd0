"""Decoding on an NVIDIA GPU: static buffers, five kernels a layer, the whole step with its sampling in one CUDA graph.

    decoder = GraphDecoder(network, batch=1, capacity=1024, choose=lambda logits, steps: logits.argmax(-1))
    logits = decoder.read(prompts); decoder.start(logits.argmax(-1)); token = decoder.next()

The graph feeds its token back to itself, so nothing waits for the host between two tokens. One row, or a few of packed
weights, run in the kernels of triton_products.py; of more rows the products are PyTorch's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.cache.cache import KeyValueCache
from clearhead.errors import ClearheadError
from clearhead.fast.launch import Matrix, attend, attention_workspace, multiply
from clearhead.fast.modules import PackedLinear, PackedMatrix
from clearhead.fast.packed import Packed
from clearhead.fast.support import are_plain, hooks_of, merge, unknown_in
from clearhead.model.attention import Attention
from clearhead.model.block import Block
from clearhead.model.branches import FeedForward
from clearhead.model.config import GroupedAttention, Layer
from clearhead.model.feed_forward import ACTIVATIONS, FeedForwardLayer
from clearhead.model.norms import RootMeanSquare
from clearhead.model.parts import Causal, LearnedPositions, RmsNorm, Rope
from clearhead.model.positions import rotation_for
from clearhead.model.transformer import Transformer

Choose = Callable[[Tensor, Tensor], Tensor]  # logits (B, V) and how many tokens there are (B,) -> the next (B,)
KNOWN_ACTIVATIONS = ("silu", "gelu_tanh", "relu")


def why_not(network: Transformer) -> str | None:
    """What the graph does not know of this model, in a few words."""
    stack = network.decoder
    if stack is None or network.encoder is not None:
        return "only a decoder alone runs in a graph"
    dtypes = {parameter.dtype for parameter in network.parameters()}
    if dtypes & {torch.float64} or len(dtypes) > 1:
        return "float64, or several precisions"
    if reason := unknown_in(stack.stack):
        return reason
    around = [stack.embedding, stack.final_norm] + ([] if network.head is None else [network.head])
    if not are_plain(list(stack.layers.modules())) or any(hooks_of([m for part in around for m in part.modules()])):
        return "modules that were exchanged or hooked into"
    if isinstance(stack.stack.embedding.positions, LearnedPositions):
        return "a table of positions: the graph goes on where it ends"
    norms = [layer.norm for layer in stack.stack.layers]
    if not all(isinstance(norm, RmsNorm) for norm in (stack.stack.final_norm, *norms)):
        return "other norms than RMS"
    attentions = [cast(GroupedAttention, layer.attention) for layer in stack.stack.layers]
    if len({(attention.num_heads, attention.num_kv_heads, attention.head_width) for attention in attentions}) > 1:
        return "layers that differ in their heads"
    return next((reason for layer in stack.stack.layers if (reason := unknown_layer(layer))), None)


def unknown_layer(layer: Layer) -> str | None:
    attention = cast(GroupedAttention, layer.attention)
    if layer.placement != "pre" or not isinstance(attention.reach, Causal) or attention.head_norm is not None:
        return "its layers are not plain ones"
    if cast(FeedForward, layer.feed_forward).activation not in KNOWN_ACTIVATIONS:
        return "this kind of feed-forward"
    if attention.head_width < 16 or attention.head_width & (attention.head_width - 1):
        return "a head width that is no power of two from 16 on"
    if attention.num_heads > 16 * attention.num_kv_heads:
        return "more than 16 query heads to a key-value head"
    return None


@dataclass(frozen=True)
class StaticLayer:
    projected: Matrix
    output: Matrix
    inner: Matrix
    down: Matrix
    attention_norm: RootMeanSquare
    feed_forward_norm: RootMeanSquare
    attention: Attention
    feed_forward: FeedForwardLayer
    gated: bool
    activation: str
    keys: Tensor  # (B, K, capacity, H)
    values: Tensor
    cosine: Tensor  # (capacity, pairs)
    sine: Tensor

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.projected, self.output, self.inner, self.down


class GraphDecoder:
    def __init__(self, network: Transformer, batch: int, capacity: int, choose: Choose):
        if reason := why_not(network):
            raise ClearheadError(f"this model does not run in a CUDA graph: {reason}")
        parameter = next(network.parameters())
        self.network, self.choose, self.capacity = network, choose, capacity
        self.device, self.dtype = parameter.device, parameter.dtype
        assert network.decoder is not None
        self.layers = [self.static_layer(block, batch) for block in network.decoder.layers]  # type: ignore[arg-type]
        self.head = head_of(network)
        matrices = [self.head, *(matrix for layer in self.layers for matrix in layer.matrices)]
        packed = all(isinstance(matrix.weight, Packed) for matrix in matrices)
        # Of plain numbers PyTorch's products are faster from two rows on; packed ones it would have to unpack.
        self.most_rows = 16 if packed else 1
        self.token = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.position = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.step = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.workspace = attention_workspace(self.layers[0].attention, batch, self.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def static_layer(self, block: Block, batch: int) -> StaticLayer:
        attention, feed_forward = block.attention, block.feed_forward
        assert isinstance(attention, Attention)
        assert isinstance(feed_forward, FeedForwardLayer)
        config = attention.config
        inner = (feed_forward.up,) if feed_forward.gate is None else (feed_forward.gate, feed_forward.up)
        buffer = torch.zeros(
            2, batch, config.num_kv_heads, self.capacity, config.head_width, dtype=self.dtype, device=self.device
        )
        cosine = sine = torch.zeros(0, 0, device=self.device)
        if isinstance(config.position, Rope):
            places = torch.arange(self.capacity, device=self.device)[None]
            rotation = rotation_for(config.position, places, config.head_width, torch.float32)
            cosine, sine = rotation.cosine[0, 0].contiguous(), rotation.sine[0, 0].contiguous()
        return StaticLayer(
            merged(attention.query, attention.key, attention.value),
            merged(attention.output),
            merged(*inner),
            merged(feed_forward.down),
            cast(RootMeanSquare, block.attention_residual.norm),
            cast(RootMeanSquare, block.feed_forward_residual.norm),
            attention,
            feed_forward,
            feed_forward.gate is not None,
            cast(FeedForward, block.layer.feed_forward).activation,
            buffer[0],
            buffer[1],
            cosine,
            sine,
        )

    @property
    def num_bytes(self) -> int:
        """Of the cache and of what the graph works in; the weights are the network's.

        More only for a while: the largest of `matrices`, when its parts are merged, and what PyTorch takes to read a
        prompt.
        """
        cache = sum(layer.keys.numel() * 2 * layer.keys.element_size() for layer in self.layers)
        return cache + sum(part.numel() * part.element_size() for part in self.workspace)

    # --- reading

    @torch.no_grad()
    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Prompts through the network, their keys and values into the static cache; logits after the last (B, V)."""
        together = len({len(prompt) for prompt in prompts}) == 1
        batches = [range(len(prompts))] if together else [range(row, row + 1) for row in range(len(prompts))]
        return torch.cat([self.read_some([prompts[row] for row in rows], rows) for rows in batches])

    def read_some(self, prompts: Sequence[Sequence[int]], rows: range) -> Tensor:
        """Of one length, into these rows of the cache."""
        tokens = torch.tensor([list(prompt) for prompt in prompts], device=self.device)
        length, here = tokens.shape[1], slice(rows.start, rows.stop)
        if length >= self.capacity:
            raise ClearheadError(f"the prompt has {length} tokens; this decoder was made for {self.capacity}")
        cache = KeyValueCache(self.network.config)
        hidden = self.network.hidden(tokens, cache=cache)
        for layer, store in zip(self.layers, cache.stores, strict=True):
            kept = store.tensors()
            layer.keys[here, :, :length] = kept["key"][:, :, :length]
            layer.values[here, :, :length] = kept["value"][:, :, :length]
        self.position[here] = length
        return self.to_logits(hidden[:, -1].contiguous())

    def start(self, tokens: Tensor) -> None:
        """The first token of each row, chosen from what `read` gave."""
        self.token.copy_(tokens)
        self.step.fill_(1)
        if self.graph is None:
            self.capture()

    def next(self) -> Tensor:
        """The token after the last (B,), a buffer that the next call changes. The GPU may still be at work on it."""
        assert self.graph is not None
        self.graph.replay()
        return self.token

    @torch.no_grad()
    def capture(self) -> None:
        state = [tensor.clone() for tensor in (self.token, self.position, self.step)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is compiled or reserved on first use must be so before
            for _ in range(2):
                self.advance()
                self.restore(state)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # others may go on allocating
            self.advance()
        self.restore(state)

    def restore(self, state: list[Tensor]) -> None:
        for tensor, value in zip((self.token, self.position, self.step), state, strict=True):
            tensor.copy_(value)

    # --- the step

    def advance(self) -> None:
        stack = self.network.decoder
        assert stack is not None
        x = stack.embedding(self.token[:, None], self.position[:, None], None)[:, 0]
        run = self.by_kernels if len(x) <= self.most_rows else self.by_products
        x = x.contiguous()
        for layer in self.layers:
            run(layer, x)
        logits = self.to_logits(x, cast(RootMeanSquare, stack.final_norm))
        self.token.copy_(self.choose(logits, self.step))
        self.position += 1
        self.step += 1

    def by_kernels(self, layer: StaticLayer, x: Tensor) -> None:
        """x (B, D), changed in place."""
        projected = multiply(x, layer.projected, norm=layer.attention_norm)
        mixed = self.attend(layer, projected)
        multiply(mixed, layer.output, residual=x)
        inner = multiply(x, layer.inner, norm=layer.feed_forward_norm, gated=layer.gated, activation=layer.activation)
        multiply(inner, layer.down, residual=x)

    def by_products(self, layer: StaticLayer, x: Tensor) -> None:
        """The same for many rows: what they cost is no longer to read the weights."""
        projected = functional.linear(layer.attention_norm(x), layer.projected.numbers(x.dtype), layer.projected.bias)
        x += functional.linear(self.attend(layer, projected), layer.output.numbers(x.dtype), layer.output.bias)
        inner = functional.linear(layer.feed_forward_norm(x), layer.inner.numbers(x.dtype), layer.inner.bias)
        activation = ACTIVATIONS[layer.activation]  # type: ignore[index]
        if layer.gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = activation(gate) * up
        else:
            inner = activation(inner)
        x += functional.linear(inner, layer.down.numbers(x.dtype), layer.down.bias)

    def to_logits(self, x: Tensor, norm: RootMeanSquare | None = None) -> Tensor:
        """x (B, D), through the norm where one is given -> (B, V)."""
        head = self.network.head
        plain = head is None or (
            isinstance(head.transform, nn.Identity) and head.config.scale == 1.0 and head.config.softcap is None
        )
        if plain and len(x) <= self.most_rows:
            return multiply(x, self.head, norm=norm).float()
        return self.network.to_logits(x if norm is None else norm(x)).float()

    def attend(self, layer: StaticLayer, projected: Tensor) -> Tensor:
        """(B, (N + 2K) H) -> (B, N H)."""
        return attend(
            projected,
            layer.attention,
            (layer.keys, layer.values),
            self.position,
            (layer.cosine, layer.sine),
            self.workspace,
        )


class Mailbox:
    """Tokens on their way from the GPU; reading them waits for these, and for nothing after them."""

    def __init__(self, tokens: Tensor):
        self.letter = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        self.letter.copy_(tokens, non_blocking=True)
        self.arrived = torch.cuda.Event()
        self.arrived.record()

    def read(self) -> list[int]:
        self.arrived.synchronize()
        return self.letter.tolist()


def merged(*modules: nn.Linear | PackedLinear) -> Matrix:
    biases = [module.bias.detach() for module in modules if module.bias is not None]
    return Matrix(merge(modules), torch.cat(biases) if biases else None)


def head_of(network: Transformer) -> Matrix:
    """The logit head's own matrix, or the token table that it is tied to."""
    head, stack = network.head, network.decoder
    assert stack is not None
    own = stack.embedding.tokens.weight if head is None or head.weight is None else head.weight
    weight: Tensor | PackedMatrix = own
    return Matrix(
        weight.packed if isinstance(weight, PackedMatrix) else weight.detach(), None if head is None else head.bias
    )
