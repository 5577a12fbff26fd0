"""Decode many sequences on an NVIDIA GPU: keys and values in pages, one captured step per batch size, kept for reuse.

    decoder = PagedDecoder(network, storage, num_seats=256)
    decoder.seats.assign([SeatedSequence(seat=0, num_tokens=len(prompt), pages=table.pages, options=options)])
    logits = decoder.prefill(tokens, layout, last_tokens)         # packed prompts of any lengths -> (S, V)
    first = decoder.choose(logits, seats=[0])                     # AsyncTokens
    following = decoder.step(seats=[0])                           # AsyncTokens, and so on

Everything between two steps stays on the device: the chosen token is the input of the next step. The host may start a
step before it has read the tokens of the previous one; it only has to know how long each sequence is, so that every
page that a step writes to is in the table of its seat.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from clearhead.architecture import LearnedPositions
from clearhead.backends.cuda.async_tokens import AsyncTokens
from clearhead.backends.cuda.launch import fused_linear, plain_linear
from clearhead.backends.cuda.paged_encoder import PagedEncoder
from clearhead.backends.cuda.paged_launch import add_and_normalize, embed_seats
from clearhead.backends.cuda.paged_layers import build_layers, run_layers, run_layers_in_kernels
from clearhead.backends.cuda.paged_steps import DecodeStep, PromptStep
from clearhead.backends.cuda.sampler import Sampler
from clearhead.backends.cuda.seats import Seats
from clearhead.backends.live_checks import unsupported_network_reason
from clearhead.backends.lowering import lower_head
from clearhead.backends.lowering_norms import NormModule
from clearhead.backends.packed import PackedWeight
from clearhead.cache import PackedLayout, PageStorage
from clearhead.errors import ClearheadError
from clearhead.model import TokenEmbedding, Transformer

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # rows for which a step is captured
_MAX_PACKED_ROWS = 16  # rows up to which packed weights run in the Triton kernels


class PagedDecoder:
    """A network with merged weights, its pages and seats, and the captured steps of all batch sizes needed so far."""

    def __init__(
        self,
        network: Transformer,
        storage: PageStorage,
        num_seats: int = 256,
        max_tokens: int | None = None,
        source_storage: PageStorage | None = None,
    ):
        """Merge the weights of the network and allocate the seats.

        storage: pages of every layer on the device of the network (`PageStorage.for_stack`).
        num_seats: how many sequences can run at the same time.
        max_tokens: the longest sequence, and the longest source; None: all pages.
        source_storage: of an encoder-decoder, the pages of cross-attention (`PageStorage.for_sources`).
        """
        if reason := unsupported_network_reason(network, "paged"):
            raise ClearheadError(f"this model cannot run in the GPU kernels: {reason}")
        parameter = next(network.parameters())
        assert network.decoder is not None
        self.network, self.storage, self.stack = network, storage, network.decoder
        self.device, self.dtype = parameter.device, parameter.dtype
        page_size = storage.pool.page_size
        max_pages = storage.pool.num_pages_for(max_tokens or storage.pool.num_pages * page_size)
        max_source_pages = 0
        self.encoder: PagedEncoder | None = None
        with torch.inference_mode(parameter.is_inference()), torch.no_grad():
            if source_storage is not None:
                pool = source_storage.pool
                max_source_pages = pool.num_pages_for(max_tokens or pool.num_pages * pool.page_size)
                self.encoder = PagedEncoder(network, source_storage, max_source_pages * pool.page_size)
            source_pages = None if source_storage is None else source_storage.layers
            self.layers = build_layers(self.stack, storage.layers, max_pages * page_size, source_pages)
        self.head = lower_head(network)
        projections = [self.head, *(projection for layer in self.layers for projection in layer.projections)]
        packed = all(isinstance(projection.weight, PackedWeight) for projection in projections)
        self.max_kernel_rows = _MAX_PACKED_ROWS if packed else 1
        self.runs_in_kernels = all(layer.placement in ("pre", "sandwich") for layer in self.layers)
        self.seats = Seats(num_seats, max_pages, network.config.vocab_size, self.device, max_source_pages)
        self.sizes = (*(size for size in SIZES if size < num_seats), num_seats)
        self.steps: dict[tuple[int, bool], CapturedStep] = {}
        self.samplers: dict[tuple[int, bool], Sampler] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None  # shared by all graphs

    # --- prompts

    def encode(self, tokens: Tensor, layout: PackedLayout) -> None:
        """Run packed sources (T,), and write the keys and values of cross-attention to their pages."""
        assert self.encoder is not None, "only an encoder-decoder has sources"
        self.encoder.read(tokens, layout)

    @torch.inference_mode()
    def prefill(
        self, tokens: Tensor, layout: PackedLayout, last_tokens: Tensor, source_layout: PackedLayout | None = None
    ) -> Tensor:
        """Run packed tokens (T,) and write their keys and values; return the logits (S, V) after `last_tokens` (S,).

        The tokens are chunks of any number of sequences, in the layout of PackedCache; a sequence may also continue
        pages that earlier chunks, other sequences with the same prefix, or steps have written. last_tokens: indices
        among the T tokens, usually the last one of each prompt that is complete. source_layout: where the sources of
        the sequences are that `encode` has read. Nothing waits for the device.
        """
        return self.logits(self.read(tokens, layout, source_layout)[last_tokens])

    @torch.inference_mode()
    def read(self, tokens: Tensor, layout: PackedLayout, source_layout: PackedLayout | None = None) -> Tensor:
        """Run packed tokens (T,), store their keys and values, and return the residual stream (T, D) for `logits`."""
        return run_layers(self.layers, self._embed(tokens, layout.positions), PromptStep(layout, source_layout))

    def choose(self, logits: Tensor, seats: Sequence[int]) -> AsyncTokens:
        """Choose the next tokens of these seats from logits (S, V); the next step that names a seat runs its token."""
        size, adjust = self._size(len(seats)), self.seats.needs_adjustment(seats)
        if (size, adjust) not in self.samplers:
            self.samplers[size, adjust] = Sampler(self.seats, size, adjust)
        active = self.seats.upload(list(seats), torch.int32)
        return AsyncTokens(self.samplers[size, adjust].choose(logits, active))

    # --- steps

    def step(self, seats: Sequence[int]) -> AsyncTokens:
        """Run the next token of each of these seats, choose the following one, and return it on its way to the host.

        A step is captured when its batch size is needed for the first time, which takes about a tenth of a second.
        """
        return AsyncTokens(self.launch_step(seats).tokens[: len(seats)])

    def launch_step(self, seats: Sequence[int]) -> "CapturedStep":
        """Start a step and return its buffers: `tokens` (B,), and `logits` (B, V), valid until the next step."""
        size, adjust = self._size(len(seats)), self.seats.needs_adjustment(seats)
        if (size, adjust) not in self.steps:
            self.seats.activate((), self.seats.num_seats)
            self.steps[size, adjust] = CapturedStep(self, size, adjust)
        self.seats.activate(seats, size)
        step = self.steps[size, adjust]
        step.replay()
        return step

    def warm_up(self, num_seats: int) -> None:
        """Capture the steps for up to this many sequences before they are needed."""
        for size in self.sizes:
            if size <= self._size(num_seats) and (size, False) not in self.steps:
                self.seats.activate((), self.seats.num_seats)
                self.steps[size, False] = CapturedStep(self, size, adjust=False)

    def _size(self, num_rows: int) -> int:
        """Return the batch size of the captured step for this many rows."""
        if not 0 < num_rows <= self.seats.num_seats:
            raise ClearheadError(f"a step has {num_rows} sequences; this decoder takes 1 to {self.seats.num_seats}")
        return next(size for size in self.sizes if size >= num_rows)

    def run_step(self, sampler: Sampler, step: DecodeStep) -> tuple[Tensor, Tensor]:
        """Run the tokens of the active seats through the network and choose the next ones; return them and the logits.

        Rows without a seat compute something that nobody reads.
        """
        active = self.seats.active[: step.num_rows]
        embedding = cast(TokenEmbedding, self.stack.embedding)
        x, positions = embed_seats(embedding.tokens, embedding.config.scale, self.seats, len(active))
        x = embedding.finish(x[None], self._known_positions(positions)[None])[0].contiguous()
        in_kernels = self.runs_in_kernels and len(x) <= self.max_kernel_rows
        x = (run_layers_in_kernels if in_kernels else run_layers)(self.layers, x, step)
        logits = self.logits(x)
        return sampler.choose(logits, active), logits

    # --- the network

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the embeddings (T, D)."""
        return self.stack.embedding(tokens[None], self._known_positions(positions)[None], None)[0].contiguous()

    def _known_positions(self, positions: Tensor) -> Tensor:
        """Return positions within a position table; a sequence that has ended may be beyond its end."""
        table = self.network.config.output_stack.token_embedding.positions
        return positions.clamp(0, table.num_positions - 1) if isinstance(table, LearnedPositions) else positions

    @torch.inference_mode()
    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (B, V) of x (B, D), to which the final norm is applied first."""
        head, final_norm = self.network.head, self.stack.final_norm
        norm = None if self.stack.stack.final_norm is None else cast(NormModule, final_norm)
        is_product = head is None or (
            isinstance(head.transform, nn.Identity) and head.config.scale == 1.0 and head.config.softcap is None
        )
        if is_product and len(x) <= self.max_kernel_rows:
            return fused_linear(x, self.head, norm=norm)
        normed = x if norm is None else add_and_normalize(x, None, norm)
        return plain_linear(normed, self.head) if is_product else self.network.compute_logits(normed)


class CapturedStep:
    """A step for a fixed number of rows as a CUDA graph, with the buffers of its results."""

    def __init__(self, decoder: PagedDecoder, size: int, adjust: bool):
        """Capture the step; all seats must be inactive, since it also runs before it is captured."""
        self.decoder = decoder
        self.sampler = Sampler(decoder.seats, size, adjust)
        self.step = DecodeStep(decoder.seats, size)
        self.tokens, self.logits = self.sampler.chosen, torch.empty(0)
        self.graph = torch.cuda.CUDAGraph()
        self.capture()

    @torch.inference_mode()
    def capture(self) -> None:
        """Compile the kernels, allocate workspaces, and record the step."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.decoder.run_step(self.sampler, self.step)
        torch.cuda.current_stream().wait_stream(stream)
        # In this mode, other threads may allocate memory meanwhile.
        with torch.cuda.graph(self.graph, pool=self.decoder.pool, capture_error_mode="thread_local"):
            self.tokens, self.logits = self.decoder.run_step(self.sampler, self.step)

    def replay(self) -> None:
        """Start the step for the active seats."""
        self.graph.replay()
