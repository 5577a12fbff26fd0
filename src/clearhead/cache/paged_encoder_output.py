"""Encoder output in pages: the keys and values that the cross-attention of packed tokens reads.

    encoder_output = PagedEncoderOutput.for_targets(storage, source_layout, cache.layout)

The keys and values of each source are computed once and stay in pages while its target is written. The network's own
modules read them layer by layer; kernels read the pages in place.
"""

from dataclasses import dataclass

from torch import Tensor

from clearhead.cache.packed_cache import PackedLayout
from clearhead.cache.page_storage import PageStorage
from clearhead.model import EncoderOutput


@dataclass(frozen=True, kw_only=True)
class PagedEncoderOutput(EncoderOutput):
    """The sources of packed sequences; a target token attends to the source of its own sequence."""

    storage: PageStorage  # keys and values of cross-attention
    layout: PackedLayout  # of all tokens of all sources, in the order of the targets

    @staticmethod
    def for_targets(storage: PageStorage, layout: PackedLayout, targets: PackedLayout) -> "PagedEncoderOutput":
        """Return the sources with the layout `layout` for new target tokens."""
        keys, _ = storage.layers[0]
        return PagedEncoderOutput(
            states=keys.new_empty(1, len(layout.slots), 0),  # not used, since keys and values are stored
            target_documents=targets.documents[None],
            source_documents=layout.documents[None],
            storage=storage,
            layout=layout,
        )

    def for_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values (1, K, S, H) of all sources for the cross-attention of a layer."""
        keys, values = self.storage.read(layer, self.layout.slots)  # (S, K, H)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
