"""Key-value caches: what a model stores of past tokens between the steps of generation.

    key_value_cache  a cache of sequences that share their slots
    stores           where one layer keeps its keys and values: contiguous, or a ring of the last tokens
    page_pool        allocation, sharing and eviction of pages; no tensors
    page_storage     the keys and values of all pages
    paged_cache      a cache in pages whose new tokens are padded to one length; its pages hold no padding
    packed_cache     the same for packed tokens: sequences of any length in one row without padding
    paged_encoder_output
                     the keys and values of their sources, for cross-attention
    step             run new tokens through the network and advance the cache

model/context.py defines the protocol through which the network uses a cache.
"""

from clearhead.cache.key_value_cache import KeyValueCache, key_value_shape
from clearhead.cache.packed_cache import PackedCache, PackedLayout
from clearhead.cache.page_pool import OutOfPagesError, PageCopy, PagePool, PageTable
from clearhead.cache.page_storage import PageStorage
from clearhead.cache.paged_cache import PagedCache
from clearhead.cache.paged_encoder_output import PagedEncoderOutput
from clearhead.cache.step import forward_hidden, forward_step
from clearhead.cache.stores import ContiguousStore, ReservedSlot

__all__ = [
    "ContiguousStore",
    "KeyValueCache",
    "OutOfPagesError",
    "PackedCache",
    "PackedLayout",
    "PageCopy",
    "PagePool",
    "PageStorage",
    "PageTable",
    "PagedCache",
    "PagedEncoderOutput",
    "ReservedSlot",
    "forward_hidden",
    "forward_step",
    "key_value_shape",
]
