"""The encoder of an encoder-decoder on an NVIDIA GPU: packed sources, and the keys and values that decoders attend to.

encoder = PagedEncoder(network, source_storage, num_positions=8192); encoder.read(tokens, layout)
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from clearhead.backends.cuda.paged_launch import PagedAttention, add_and_normalize, store_keys
from clearhead.backends.cuda.paged_layers import build_cross_pages, build_layers, linear, run_layers
from clearhead.backends.cuda.paged_steps import SourceStep
from clearhead.backends.lowering_norms import NormModule
from clearhead.backends.lowering_projections import Projection, merge_projections
from clearhead.cache import PackedLayout, PageStorage
from clearhead.model import Attention, Block, Transformer


@dataclass(frozen=True)
class _CrossKeys:
    """The projection of encoder states to the keys and values of one decoder layer, and their pages."""

    key_value: Projection  # (2K H, D)
    pages: PagedAttention


class PagedEncoder:
    """An encoder with merged weights, and the pages of cross-attention that it writes."""

    def __init__(self, network: Transformer, storage: PageStorage, num_positions: int):
        """Merge the weights. storage: pages of the cross-attention of all layers (`PageStorage.for_sources`)."""
        assert network.encoder is not None
        assert network.decoder is not None
        self.stack, self.page_size = network.encoder, storage.pool.page_size
        parameter = next(network.parameters())
        no_pages = parameter.new_empty(0, 0, 0, 0), parameter.new_empty(0, 0, 0, 0)  # a step brings its own
        self.layers = build_layers(self.stack, dict.fromkeys(range(len(self.stack.layers)), no_pages), num_positions)
        self.cross_keys = [
            _build_cross_keys(cast(Attention, cast(Block, block).cross_attention), storage.layers[number])
            for number, block in enumerate(network.decoder.layers)
        ]

    @torch.inference_mode()
    def read(self, tokens: Tensor, layout: PackedLayout) -> None:
        """Run complete packed sources (T,) and write the keys and values of every decoder layer to their pages."""
        x = self.stack.embedding(tokens[None], layout.positions[None], None)[0].contiguous()
        x = run_layers(self.layers, x, SourceStep.from_layout(layout, self.page_size))
        if self.stack.stack.final_norm is not None:
            x = add_and_normalize(x, None, cast(NormModule, self.stack.final_norm))
        for layer in self.cross_keys:
            store_keys(linear(x, layer.key_value), layer.pages, layout)


def _build_cross_keys(module: Attention, pages: tuple[Tensor, Tensor]) -> _CrossKeys:
    return _CrossKeys(merge_projections(module.key, module.value), build_cross_pages(module, pages))
