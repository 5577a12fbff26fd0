"""What a sequence keeps between steps, and where.

table = clearhead.cache.pages.PagePool(num_pages=64, page_size=16).start(prompt_ids)
"""

from clearhead.cache.cache import (
    KeyValueCache,
    cached_shape,
)
from clearhead.cache.paged import (
    PagedCache,
    PageStorage,
)
from clearhead.cache.pages import (
    BlockTable,
    PagePool,
)
from clearhead.cache.stores import (
    ContiguousStore,
    Place,
)

__all__ = [
    "BlockTable",
    "ContiguousStore",
    "KeyValueCache",
    "PagePool",
    "PageStorage",
    "PagedCache",
    "Place",
    "cached_shape",
]
