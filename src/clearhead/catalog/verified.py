"""Remember which installed files have been verified, so that their SHA-256 is computed only once.

    if is_verified(package, folder): remember_verified(package, folder)

The stamp of a package lists size, modification time and inode of its files. If one of them changes, the files are read
and compared again.
"""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from clearhead.catalog.archives import Package
from clearhead.errors import ClearheadError
from clearhead.files import read_json, write_text
from clearhead.home import home


def is_verified(package: Package, folder: Path) -> bool:
    """Return whether all files of a package in `folder` have the expected content; compute digests only if needed."""
    try:
        state = _state(package, folder)
        if any(size != file.num_bytes for file, (size, *_) in zip(package.files, state, strict=True)):
            return False
        if _stamp(package) == state:
            return True
        if any(_digest(folder / file.name) != file.sha256 for file in package.files):
            return False
    except OSError:
        return False
    remember_verified(package, folder)
    return True


def remember_verified(package: Package, folder: Path) -> None:
    """Record on disk that the files of a package have just been verified."""
    path = _stamp_path(package)
    with suppress(OSError):  # without a stamp, they are verified again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(_state(package, folder)))


def _state(package: Package, folder: Path) -> list[list[int]]:
    """Return [size, modification time, inode] of each file; raise OSError if one is missing or not a regular file."""
    state = []
    for file in package.files:
        path = folder / file.name
        if not path.is_file():
            raise FileNotFoundError(path)
        status = path.stat()
        state.append([status.st_size, status.st_mtime_ns, status.st_ino])
    return state


def _stamp(package: Package) -> object:
    try:
        return read_json(_stamp_path(package))
    except ClearheadError:
        return None  # never verified


def _stamp_path(package: Package) -> Path:
    return home() / "verified" / f"{package.name}.json"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
