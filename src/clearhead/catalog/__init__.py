"""Models and data sets that can be installed by name, and the store that holds them.

get("smollm2")
"""

from clearhead.catalog import store
from clearhead.catalog.examples import EXAMPLES
from clearhead.catalog.packages import DATASETS, PACKAGES
from clearhead.catalog.store import get

__all__ = ["DATASETS", "EXAMPLES", "PACKAGES", "get", "store"]
