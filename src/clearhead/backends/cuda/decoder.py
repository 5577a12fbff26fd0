"""Decoding on an NVIDIA GPU: static buffers, few kernels a layer, the whole step with its sampling in one CUDA graph.

    decoder = GraphDecoder(network, batch=1, capacity=1024, choose=lambda logits, steps: logits.argmax(-1))
    logits = decoder.read(prompts); decoder.start(logits.argmax(-1)); token = decoder.next()

The graph feeds its token back to itself, so nothing waits for the host between two tokens. One row, or a few of packed
weights, run in the kernels of triton_products.py; of more rows the products are PyTorch's.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.architecture import Causal, FeedForward, GroupedAttention, Layer, LearnedPositions, SlidingWindow
from clearhead.backends.cuda.launch import Matrix, Norm, attend, attention_workspace, multiply
from clearhead.backends.cuda.layers import Angles, StaticLayer, head_of, static_layer, with_room
from clearhead.backends.lowering import are_plain, hooks_of, unknown_in
from clearhead.backends.packed.formats import Packed
from clearhead.cache import ContiguousStore, KeyValueCache
from clearhead.errors import ClearheadError
from clearhead.model import ACTIVATIONS, Block, Transformer

Choose = Callable[[Tensor, Tensor], Tensor]  # logits (B, V) and how many tokens there are (B,) -> the next (B,)
KNOWN_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def why_no_cuda_graph(network: Transformer) -> str | None:
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
    attentions = [cast(GroupedAttention, layer.attention) for layer in stack.stack.layers]
    if len({(attention.num_heads, attention.num_kv_heads, attention.head_width) for attention in attentions}) > 1:
        return "layers that differ in their heads"
    return next((reason for layer in stack.stack.layers if (reason := unknown_layer(layer))), None)


def unknown_layer(layer: Layer) -> str | None:
    attention = cast(GroupedAttention, layer.attention)
    if layer.placement not in ("pre", "sandwich") or not isinstance(attention.pattern, Causal | SlidingWindow):
        return "its layers are not plain ones"
    if cast(FeedForward, layer.feed_forward).activation not in KNOWN_ACTIVATIONS:
        return "this kind of feed-forward"
    if attention.head_width < 16 or attention.head_width & (attention.head_width - 1):
        return "a head width that is no power of two from 16 on"
    if attention.num_heads > 16 * attention.num_kv_heads:
        return "more than 16 query heads to a key-value head"
    return None


class GraphDecoder:
    multiply = staticmethod(multiply)

    def __init__(
        self, network: Transformer, batch: int, capacity: int, choose: Choose, cache: KeyValueCache | None = None
    ):
        """`capacity`: tokens of the longest row, with those in the `cache` that is gone on with, where there is one."""
        if reason := why_no_cuda_graph(network):
            raise ClearheadError(f"this model does not run in a CUDA graph: {reason}")
        parameter = next(network.parameters())
        self.network, self.choose = network, choose
        self.device, self.dtype = parameter.device, parameter.dtype
        assert network.decoder is not None
        blocks, angles = cast(list[Block], list(network.decoder.layers)), Angles()
        self.cache = cache or self.blank_cache(capacity)
        self.kept = self.cache.length
        with torch.inference_mode(parameter.is_inference()), torch.no_grad():  # merged weights can be trained as before
            self.layers = [
                static_layer(block, store, self.kept, (batch, capacity), angles)
                for block, store in zip(blocks, self.stores, strict=True)
            ]
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

    def blank_cache(self, capacity: int) -> KeyValueCache:
        """Of the tokens before a window too: a kernel does not look at them, and needs no ring to leave them out."""
        layers = self.network.config.output_stack.layers
        return KeyValueCache(self.network.config, stores=[ContiguousStore(capacity) for _ in layers])

    @property
    def stores(self) -> list[ContiguousStore]:
        return cast(list[ContiguousStore], self.cache.stores)

    @property
    def capacity(self) -> int:
        return min(layer.keys.shape[2] for layer in self.layers)  # some may have grown when memory ran out

    @property
    def num_bytes(self) -> int:
        """Of the cache, of the angles that layers share and of what the graph works in; the weights are the network's.

        More only for a while: the largest of `matrices`, when its parts are merged, and what PyTorch takes to read a
        prompt.
        """
        held = {part for layer in self.layers for part in (layer.keys, layer.values, layer.cosine, layer.sine)}
        return sum(part.nbytes for part in (*held, *self.workspace))

    # --- reading

    @torch.inference_mode()  # as decode.py, which may have made the cache
    def read(self, prompts: Sequence[Sequence[int]], num_at_once: int | None = None) -> Tensor:
        """Prompts through the network, their keys and values into the cache; logits after the last (B, V).

        `num_at_once`: tokens; with windows, what a long prompt takes of memory grows with the square of it.
        """
        if len({len(prompt) for prompt in prompts}) == 1:
            self.cache.truncate(self.kept)
            return self.read_some(prompts, slice(None), self.cache, num_at_once)
        assert not self.kept, "a cache that is gone on with has no padding"
        return torch.cat([self.read_alone(prompt, row, num_at_once) for row, prompt in enumerate(prompts)])

    def read_alone(self, prompt: Sequence[int], row: int, num_at_once: int | None) -> Tensor:
        """One that is longer or shorter than the others."""
        here, cache = slice(row, row + 1), self.blank_cache(len(prompt))
        logits = self.read_some([prompt], here, cache, num_at_once)
        for layer, store in zip(self.layers, cache.stores, strict=True):
            kept = store.tensors()
            layer.keys[here, :, : cache.length] = kept["key"][:, :, : cache.length]
            layer.values[here, :, : cache.length] = kept["value"][:, :, : cache.length]
        return logits

    def read_some(
        self, prompts: Sequence[Sequence[int]], here: slice, cache: KeyValueCache, num_at_once: int | None
    ) -> Tensor:
        """Of one length, for these rows."""
        tokens = torch.tensor([list(prompt) for prompt in prompts], device=self.device)
        length = cache.length + tokens.shape[1]
        if length >= self.capacity:
            raise ClearheadError(f"the text has {length} tokens; this decoder was made for {self.capacity}")
        for piece in tokens.split(num_at_once or tokens.shape[1], dim=1):
            hidden = self.network.hidden_states(piece, cache=cache)
            cache.advance()
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

    def grow(self) -> None:
        """Double a cache that is full, layer after layer; the graph that writes into the old one goes first."""
        self.graph, used, angles = None, self.capacity, Angles()
        for number, (layer, store) in enumerate(zip(self.layers, self.stores, strict=True)):
            self.layers[number] = with_room(layer, store, used, 2 * used, angles)
        self.capture()

    @torch.inference_mode()
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
        x = stack.embedding(self.token[:, None], self.place[:, None], None)[:, 0]
        run = self.by_kernels if len(x) <= self.most_rows else self.by_products
        x = x.contiguous()
        for layer in self.layers:
            run(layer, x)
        logits = self.to_logits(x, None if stack.stack.final_norm is None else cast(Norm, stack.final_norm))
        self.token.copy_(self.choose(logits, self.step))
        self.position += 1
        self.step += 1

    @property
    def place(self) -> Tensor:
        """Where the embedding is to see the token. A row that is done goes on, though not beyond a table's end."""
        positions = self.network.config.output_stack.embedding.positions
        if isinstance(positions, LearnedPositions):
            return self.position.clamp(max=positions.num_positions - 1)
        return self.position

    def by_kernels(self, layer: StaticLayer, x: Tensor) -> None:
        """x (B, D), changed in place."""
        projected = self.multiply(x, layer.projected, norm=layer.attention_norm)
        self.add(x, self.attend(layer, projected), layer.output, layer.attention_branch_norm)
        inner = self.multiply(
            x, layer.inner, norm=layer.feed_forward_norm, gated=layer.gated, activation=layer.activation
        )
        self.add(x, inner, layer.down, layer.feed_forward_branch_norm)

    def add(self, x: Tensor, inner: Tensor, matrix: Matrix, branch_norm: nn.Module) -> None:
        if isinstance(branch_norm, nn.Identity):
            self.multiply(inner, matrix, residual=x)
        else:
            x += branch_norm(self.multiply(inner, matrix))

    def by_products(self, layer: StaticLayer, x: Tensor) -> None:
        """The same for many rows: what they cost is no longer to read the weights."""
        projected = functional.linear(layer.attention_norm(x), layer.projected.numbers(x.dtype), layer.projected.bias)
        mixed = functional.linear(self.attend(layer, projected), layer.output.numbers(x.dtype), layer.output.bias)
        x += layer.attention_branch_norm(mixed)
        inner = functional.linear(layer.feed_forward_norm(x), layer.inner.numbers(x.dtype), layer.inner.bias)
        activation = ACTIVATIONS[layer.activation]
        if layer.gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = activation(gate) * up
        else:
            inner = activation(inner)
        x += layer.feed_forward_branch_norm(functional.linear(inner, layer.down.numbers(x.dtype), layer.down.bias))

    def to_logits(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """x (B, D), through the norm where one is given -> (B, V)."""
        head = self.network.head
        plain = head is None or (
            isinstance(head.transform, nn.Identity) and head.config.scale == 1.0 and head.config.softcap is None
        )
        if plain and len(x) <= self.most_rows:
            return self.multiply(x, self.head, norm=norm).float()
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


class AsyncTokens:
    """Tokens on their way from the GPU; reading them waits for these, and for nothing after them."""

    def __init__(self, tokens: Tensor):
        self.letter = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        self.letter.copy_(tokens, non_blocking=True)
        self.arrived = torch.cuda.Event()
        self.arrived.record()

    def read(self) -> list[int]:
        self.arrived.synchronize()
        return self.letter.tolist()
