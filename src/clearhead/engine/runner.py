"""Run a packed batch through the network. The runner knows tensors and pages, but no requests.

    runner = Runner(network, storage, source_storage); hidden = runner.run(batch)      # (T, D)

The network's modules, or the CPU kernels in their place, write the keys and values of the new tokens to their pages and
read the pages of each sequence. With `rows_alone`, every token passes through the network alone: what PyTorch computes
for a row of a batch depends in its last bits on the number of rows. With `sources_alone`, only the encoder reads one
source after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.cache import (
    PackedCache,
    PackedLayout,
    PageCopy,
    PagedEncoderOutput,
    PageStorage,
    PageTable,
    forward_hidden,
)
from clearhead.engine.batch import PackedBatch, source_layout
from clearhead.model import Transformer


@dataclass(frozen=True)
class Runner:
    """A network with the pages of its keys and values."""

    network: Transformer
    storage: PageStorage
    source_storage: PageStorage | None = None  # keys and values of cross-attention
    rows_alone: bool = False
    sources_alone: bool = False

    @torch.inference_mode()
    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages before they are written to (`PageCopy`)."""
        for copy in copies:
            self.storage.copy_page(*copy)

    @torch.inference_mode()
    def run(self, batch: PackedBatch) -> Tensor:
        """Read the tokens of a batch and return their last hidden states (T, D)."""
        if self.rows_alone and len(batch.tokens) > 1:
            return torch.cat([self.run_together(each) for each in batch.tokens_alone()])
        return self.run_together(batch)

    def run_together(self, batch: PackedBatch) -> Tensor:
        """Read the tokens of a batch in one forward pass (T, D)."""
        cache = PackedCache(self.storage, batch.layout)
        hidden = forward_hidden(
            self.network,
            batch.tokens[None],
            cache,
            encoder_output=self.encoder_output(batch),
            absorb=not batch.has_prompts,  # unfolding the latents pays off for many new tokens
        )
        return hidden[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (L, V) of hidden states (L, D)."""
        if self.rows_alone and len(hidden) > 1:  # a copy of each row has the same alignment
            return torch.cat([self.network.compute_logits(row.clone()) for row in hidden.split(1)])
        return self.network.compute_logits(hidden)

    # --- encoder-decoders

    @torch.inference_mode()
    def encode(self, sources: Sequence[Sequence[int]], tables: Sequence[PageTable]) -> None:
        """Run the encoder on sources, and write the keys and values of cross-attention to their pages."""
        if self.sources_alone and len(sources) > 1:
            for source, table in zip(sources, tables, strict=True):
                self.encode([source], [table])
            return
        device = self.network.device
        tokens = torch.tensor([token for source in sources for token in source], device=device)
        self.encode_together(tokens, source_layout(tables, device))

    def encode_together(self, tokens: Tensor, layout: PackedLayout) -> None:
        """Run the encoder on packed sources (S,) in one forward pass."""
        assert self.source_storage is not None
        encoder_output = self.network.encode(tokens[None], documents=layout.documents[None])
        keys_values = self.network.precompute_cross_attention(encoder_output).cross_keys_values
        assert keys_values is not None
        for layer, (key, value) in enumerate(keys_values):  # (1, K, S, H)
            self.source_storage.write(layer, layout.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))

    def encoder_output(self, batch: PackedBatch) -> PagedEncoderOutput | None:
        """Return the sources that the tokens of a batch attend to."""
        if self.source_storage is None or batch.source_layout is None:
            return None
        return PagedEncoderOutput.for_targets(self.source_storage, batch.source_layout, batch.layout)
