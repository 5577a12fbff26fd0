"""Write the files of a checkpoint. Every write, fsync and rename goes through one small object, which tests replace.

    digest = write_file(FileSystem(), path, safetensors_chunks({"weight": tensor}, {}))

A checkpoint becomes visible when its folder is renamed, so its files need no temporary names as in `clearhead.files`.
Tensors are written one after another, so that a save needs extra memory for one tensor and not for all of them.
"""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

READ_BYTES = 2**20


class FileSystem:
    """The operations that a save performs on the disk."""

    def write(self, file: BinaryIO, chunk: bytes | memoryview) -> None:
        """Append a chunk to an open file."""
        file.write(chunk)

    def fsync(self, descriptor: int) -> None:
        """Wait until the file or folder is on the disk."""
        os.fsync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder atomically."""
        os.rename(old, new)


@dataclass(frozen=True)
class FileDigest:
    """Size and checksum of a file."""

    num_bytes: int
    sha256: str


def write_file(file_system: FileSystem, path: Path, chunks: Iterable[bytes | memoryview]) -> FileDigest:
    """Write a new file and fsync it. Its name is on disk after `sync_folder` of its folder."""
    sha256, num_bytes = hashlib.sha256(), 0
    with path.open("wb") as file:
        for chunk in chunks:
            file_system.write(file, chunk)
            sha256.update(chunk)
            num_bytes += len(chunk)
        file.flush()
        file_system.fsync(file.fileno())
    return FileDigest(num_bytes, sha256.hexdigest())


def digest_file(path: Path) -> FileDigest:
    """Read a file and return its size and checksum."""
    sha256, num_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            sha256.update(chunk)
            num_bytes += len(chunk)
    return FileDigest(num_bytes, sha256.hexdigest())


def sync_folder(file_system: FileSystem, folder: Path) -> None:
    """Write the entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        file_system.fsync(descriptor)
    finally:
        os.close(descriptor)
