"""Decode on an NVIDIA GPU: static buffers, few kernels per layer, the whole step with its sampling in one CUDA graph.

    decoder = GraphDecoder(network, batch=1, capacity=1024, choose=lambda logits, num_generated: logits.argmax(-1))
    logits = decoder.prefill(prompts); decoder.start(logits.argmax(-1)); tokens = decoder.replay_step()

The graph feeds the chosen token back to itself, so the GPU does not wait for the host between two tokens. A batch of
one, or of a few with packed weights, runs in the kernels of triton_products.py; larger batches use PyTorch's products.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from clearhead.architecture import LearnedPositions
from clearhead.backends.cuda.launch import attend, attention_workspace, fused_linear, plain_linear
from clearhead.backends.cuda.layers import GraphLayer, RotationTables, build_layer, with_capacity
from clearhead.backends.live_checks import unsupported_network_reason
from clearhead.backends.lowering import LoweredBlock, lower_head
from clearhead.backends.lowering_norms import NormModule
from clearhead.backends.lowering_projections import Projection
from clearhead.backends.packed import PackedWeight
from clearhead.cache import ContiguousStore, KeyValueCache, forward_hidden
from clearhead.errors import ClearheadError
from clearhead.model import ACTIVATIONS, Block, Transformer

# Logits (B, V) and the number of tokens generated so far (B,) -> the next token of each sequence (B,).
ChooseTokens = Callable[[Tensor, Tensor], Tensor]
_MAX_PACKED_ROWS = 16  # up to this many sequences, packed weights run in the Triton kernels


class GraphDecoder:
    """Decode a batch of sequences with a captured step; `prefill`, then `start`, then `replay_step` for each token."""

    fused_linear = staticmethod(fused_linear)  # a class attribute, so that the cost model can replace it

    def __init__(
        self, network: Transformer, batch: int, capacity: int, choose: ChooseTokens, cache: KeyValueCache | None = None
    ):
        """Allocate buffers for sequences of up to `capacity` tokens, including those in a `cache` to be continued."""
        if reason := unsupported_network_reason(network, "cuda"):
            raise ClearheadError(f"this model cannot run in a CUDA graph: {reason}")
        parameter = next(network.parameters())
        self.network, self.choose = network, choose
        self.device, self.dtype = parameter.device, parameter.dtype
        self.cache = cache or self.empty_cache(capacity)
        self.num_cached = self.cache.length
        assert network.decoder is not None
        blocks, tables = cast(list[Block], list(network.decoder.layers)), RotationTables()
        # Merged weights stay trainable, unless they were created in inference mode.
        with torch.inference_mode(parameter.is_inference()), torch.no_grad():
            self.layers = [
                build_layer(block, store, self.num_cached, (batch, capacity), tables)
                for block, store in zip(blocks, self.stores, strict=True)
            ]
        self.head = lower_head(network)
        projections = [self.head, *(projection for layer in self.layers for projection in layer.block.projections)]
        packed = all(isinstance(projection.weight, PackedWeight) for projection in projections)
        # PyTorch's products of plain weights are faster from two rows on; packed weights would have to be unpacked.
        self.max_kernel_rows = _MAX_PACKED_ROWS if packed else 1
        self.token = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.position = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.num_generated = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.workspace = attention_workspace(self.layers[0].block.attention, batch, self.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def empty_cache(self, capacity: int) -> KeyValueCache:
        """Return a cache that keeps all tokens, even those outside of a window: the kernel skips them."""
        layers = self.network.config.output_stack.layers
        return KeyValueCache(self.network.config, stores=[ContiguousStore(capacity) for _ in layers])

    @property
    def stores(self) -> list[ContiguousStore]:
        """The stores of the cache, one per layer."""
        return cast(list[ContiguousStore], self.cache.stores)

    @property
    def capacity(self) -> int:
        """Tokens that fit into the cache of every layer; some may be larger after an allocation failed."""
        return min(layer.keys.shape[2] for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        """Memory of the cache, the rotation tables and the workspace; the weights belong to the network.

        Temporarily, more is needed: a copy of the largest merged weight, and what PyTorch takes to process a prompt.
        """
        buffers = {part for layer in self.layers for part in (layer.keys, layer.values, layer.cosine, layer.sine)}
        return sum(part.nbytes for part in (*buffers, *self.workspace))

    # --- prompts

    @torch.inference_mode()  # a cache that decoding.py created in inference mode can only be written in this mode
    def prefill(self, prompts: Sequence[Sequence[int]], chunk_size: int | None = None) -> Tensor:
        """Process the prompts, write their keys and values to the cache, and return logits after the last token (B, V).

        chunk_size: tokens processed at once. With sliding windows, the memory for masks grows with its square.
        """
        if len({len(prompt) for prompt in prompts}) == 1:
            self.cache.truncate(self.num_cached)
            return self.prefill_rows(prompts, slice(None), self.cache, chunk_size)
        assert not self.num_cached, "a cache that is continued has no padding"
        return torch.cat([self.prefill_alone(prompt, row, chunk_size) for row, prompt in enumerate(prompts)])

    def prefill_alone(self, prompt: Sequence[int], row: int, chunk_size: int | None) -> Tensor:
        """Process one prompt of a batch with different lengths in a cache of its own, and copy the result."""
        rows, cache = slice(row, row + 1), self.empty_cache(len(prompt))
        logits = self.prefill_rows([prompt], rows, cache, chunk_size)
        for layer, store in zip(self.layers, cache.stores, strict=True):
            stored = store.tensors()
            layer.keys[rows, :, : cache.length] = stored["key"][:, :, : cache.length]
            layer.values[rows, :, : cache.length] = stored["value"][:, :, : cache.length]
        return logits

    def prefill_rows(
        self, prompts: Sequence[Sequence[int]], rows: slice, cache: KeyValueCache, chunk_size: int | None
    ) -> Tensor:
        """Process prompts of equal length, which are these rows of the batch, in the network's modules."""
        tokens = torch.tensor([list(prompt) for prompt in prompts], device=self.device)
        length = cache.length + tokens.shape[1]
        if length >= self.capacity:
            raise ClearheadError(
                f"the sequence has {length} tokens, but this decoder has a capacity of {self.capacity} including the "
                "next one; create it with a larger capacity"
            )
        for chunk in tokens.split(chunk_size or tokens.shape[1], dim=1):
            hidden = forward_hidden(self.network, chunk, cache, absorb=False)
        self.position[rows] = length
        return self.compute_logits(hidden[:, -1].contiguous())

    # --- the captured step

    def start(self, tokens: Tensor) -> None:
        """Set the first generated token of each sequence (B,), and capture the graph if that was not done yet."""
        self.token.copy_(tokens)
        self.num_generated.fill_(1)
        if self.graph is None:
            self.capture()

    def replay_step(self) -> Tensor:
        """Start one step on the GPU and return the buffer of the next tokens (B,), which the next call overwrites."""
        assert self.graph is not None
        self.graph.replay()
        return self.token

    def double_capacity(self) -> None:
        """Double a full cache, layer by layer, and capture a new graph; the old one is freed first."""
        self.graph, used, tables = None, self.capacity, RotationTables()
        for number, (layer, store) in enumerate(zip(self.layers, self.stores, strict=True)):
            self.layers[number] = with_capacity(layer, store, used, 2 * used, tables)
        self.capture()

    @torch.inference_mode()
    def capture(self) -> None:
        """Record a step as a CUDA graph; the state of the sequences stays unchanged."""
        state = [tensor.clone() for tensor in (self.token, self.position, self.num_generated)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compile kernels and allocate workspaces before the capture
            for _ in range(2):
                self.run_step()
                self.restore(state)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # other threads may allocate meanwhile
            self.run_step()
        self.restore(state)

    def restore(self, state: list[Tensor]) -> None:
        """Copy saved values back to the buffers of the sequences."""
        for tensor, value in zip((self.token, self.position, self.num_generated), state, strict=True):
            tensor.copy_(value)

    # --- one step

    def run_step(self) -> None:
        """Run `token` through the network, replace it by the next token, and advance the position."""
        stack = self.network.decoder
        assert stack is not None
        x = stack.embedding(self.token[:, None], self.embedding_position[:, None], None)[:, 0]
        run_layer = self.run_layer_in_kernels if len(x) <= self.max_kernel_rows else self.run_layer_in_pytorch
        x = x.contiguous()
        for layer in self.layers:
            run_layer(layer, x)
        logits = self.compute_logits(x, None if stack.stack.final_norm is None else cast(NormModule, stack.final_norm))
        self.token.copy_(self.choose(logits, self.num_generated))
        self.position += 1
        self.num_generated += 1

    @property
    def embedding_position(self) -> Tensor:
        """Positions for the embedding (B,). A finished sequence goes on, but not beyond the end of a position table."""
        positions = self.network.config.output_stack.token_embedding.positions
        if isinstance(positions, LearnedPositions):
            return self.position.clamp(max=positions.num_positions - 1)
        return self.position

    def run_layer_in_kernels(self, layer: GraphLayer, x: Tensor) -> None:
        """Run x (B, D) through a layer in the Triton kernels, in place."""
        block, attention, feed_forward = layer.block, layer.block.attention_residual, layer.block.feed_forward_residual
        projected = self.fused_linear(x, block.query_key_value, norm=cast(NormModule, attention.norm))
        self.add_branch(x, self.attend(layer, projected), block.attention_output, attention.branch_norm)
        inner = self.fused_linear(
            x,
            block.dense.gate_and_up,
            norm=cast(NormModule, feed_forward.norm),
            gated=block.dense.gated,
            activation=block.dense.activation.name,
        )
        self.add_branch(x, inner, block.dense.down, feed_forward.branch_norm)

    def add_branch(self, x: Tensor, inner: Tensor, projection: Projection, branch_norm: nn.Module) -> None:
        """Add the last projection of a branch, and its norm in a sandwich block, to the residual stream x in place."""
        if isinstance(branch_norm, nn.Identity):
            self.fused_linear(inner, projection, residual=x)
        else:
            x += branch_norm(self.fused_linear(inner, projection))

    def run_layer_in_pytorch(self, layer: GraphLayer, x: Tensor) -> None:
        """Run x (B, D) through a layer with PyTorch's products, in place: many rows are not limited by reading W."""
        block, attention, feed_forward = layer.block, layer.block.attention_residual, layer.block.feed_forward_residual
        projected = self.attend(layer, plain_linear(attention.norm(x), block.query_key_value))
        x += attention.branch_norm(plain_linear(projected, block.attention_output))
        inner = _activate(plain_linear(feed_forward.norm(x), block.dense.gate_and_up), block)
        x += feed_forward.branch_norm(plain_linear(inner, block.dense.down))

    def compute_logits(self, x: Tensor, norm: NormModule | None = None) -> Tensor:
        """Return logits (B, V) in float32 for x (B, D), to which `norm` is applied first."""
        head = self.network.head
        is_product = head is None or (
            isinstance(head.transform, nn.Identity) and head.config.scale == 1.0 and head.config.softcap is None
        )
        if is_product and len(x) <= self.max_kernel_rows:
            return self.fused_linear(x, self.head, norm=norm).float()
        return self.network.compute_logits(x if norm is None else norm(x)).float()

    def attend(self, layer: GraphLayer, projected: Tensor) -> Tensor:
        """Return the attention output (B, N H) for queries, keys and values side by side (B, (N + 2K) H)."""
        return attend(
            projected,
            layer.block.attention,
            (layer.keys, layer.values),
            self.position,
            (layer.cosine, layer.sine),
            self.workspace,
        )


def _activate(inner: Tensor, block: LoweredBlock) -> Tensor:
    activation = ACTIVATIONS[block.dense.activation.name]
    if not block.dense.gated:
        return activation(inner)
    gate, up = inner.chunk(2, dim=-1)
    return activation(gate) * up
