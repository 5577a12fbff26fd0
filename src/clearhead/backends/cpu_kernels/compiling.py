"""Compile the C++ kernels with the machine's own compiler and store them on disk. This module does not import torch.

    build_library(library_path())

The file name contains digests of the processor's features and of the sources and compiler flags. Several processes may
build at once: the first compiles, the others wait for it and then find the library. `start_build` lets another process
compile, which goes on if this one exits.
"""

import contextlib
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from clearhead.errors import ClearheadError
from clearhead.files import write_text
from clearhead.home import home

_SOURCES = [
    Path(__file__).parent / "source" / name
    for name in (
        *("kernels.cpp", "latent.h", "mixture.h", "pages.h", "packed_batch.h", "prompt.h", "attention.h"),
        *("scores.h", "heads.h", "linear.h", "transposed_rows.h", "outputs.h", "activations.h", "blocks.h"),
        *("few_rows.h", "panels.h", "tiles.h", "inputs.h", "vectors.h"),
    )
]
# The compiler may reorder sums, or it could not vectorize any loop; infinities and NaN keep their meaning.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
)

_WORK_PREFIX = ".compiling-"
_LEFTOVER_SECONDS = 3600  # an older work folder belongs to a killed process
_NUM_KEPT_BUILDS = 3  # older builds for the same processor; other versions of Clearhead may share the folder
_FAILURE_SECONDS = 86400  # a failed build is not repeated without being asked for during this time


@functools.cache
def library_path() -> Path:
    """Return the file of the compiled kernels; its name depends on the sources, the flags and the processor."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in _SOURCES:
        digest.update(source.read_bytes())
    machine = hashlib.sha256(_processor_features().encode())
    return home() / "kernels" / f"cpu-{machine.hexdigest()[:12]}-{digest.hexdigest()[:24]}.so"


def _processor_features() -> str:
    """Return what the meaning of -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()} {platform.node()}"


def is_intact(path: Path) -> bool:
    """Return whether a library is complete and nobody else could have written it. Raise OSError if it is missing."""
    return _is_private(path.parent) and _is_private(path) and _digest_path(path).read_text() == _digest(path)


def _is_private(path: Path) -> bool:
    """Return whether a regular file or folder belongs to this user or root and nobody else may write to it."""
    status = path.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return False
    if not hasattr(os, "getuid"):  # Windows
        return True
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _digest_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def build_library(path: Path) -> None:
    """Compile the kernels to `path`, unless another process does so while this one waits for its turn.

    Raise ClearheadError if there is no working compiler.
    """
    _compiler_command()  # before a folder is created
    before = _modification_time(path)
    with contextlib.suppress(OSError):  # `compile_library` reports it
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(path.parent):
        if _modification_time(path) not in (before, None) and is_intact(path):
            return
        try:
            compile_library(path)
        except ClearheadError as error:
            with contextlib.suppress(OSError):
                write_text(_failure_path(path), str(error))
            raise
        _failure_path(path).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process holds the lock of a folder, and hold it. Do not wait on a system without locks."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def compile_library(path: Path) -> None:
    """Compile the kernels to `path` and delete older builds; raise ClearheadError if there is no working compiler."""
    compiler = _compiler_command()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make_private(path.parent)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=_WORK_PREFIX) as folder:
            unfinished = Path(folder) / "kernels.so"
            command = [*compiler, *FLAGS, str(_SOURCES[0]), "-o", str(unfinished)]
            result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            if result.returncode:
                message = result.stderr.strip()[-500:]
                raise ClearheadError(f"{compiler[0]} cannot compile the CPU kernels: {message}")
            unfinished.chmod(0o700)  # the compiler follows the umask, which may let a group write
            with unfinished.open("r+b") as file:
                os.fsync(file.fileno())
            write_text(_digest_path(path), _digest(unfinished))
            unfinished.replace(path)
    except OSError as error:
        raise ClearheadError(f"the CPU kernels cannot be compiled: {error}") from None
    remove_older_builds(path)


def _compiler_command() -> list[str]:
    """Return the compiler and its first arguments, from $CXX or the programs that are installed."""
    configured = os.environ.get("CXX", "")
    try:
        compiler = shlex.split(configured or shutil.which("g++") or shutil.which("clang++") or "")
    except ValueError as error:
        raise ClearheadError(
            f"CXX is {configured!r}, which is not a valid command ({error}); set it to a compiler, such as CXX=g++"
        ) from None
    if not compiler:
        raise ClearheadError(
            "the CPU kernels need a C++ compiler, and none was found; install g++ or set CXX to a compiler"
        )
    return compiler


def _make_private(folder: Path) -> None:
    """Forbid other users to write to a folder of ours; raise ClearheadError if it belongs to somebody else."""
    mode = folder.stat().st_mode
    if not _is_private(folder):
        with contextlib.suppress(OSError):
            folder.chmod(stat.S_IMODE(mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
    if not _is_private(folder):
        raise ClearheadError(
            f"kernels are not compiled to {folder}, because other users can write there; "
            "set CLEARHEAD_HOME to a folder that only you can write to"
        )


def remove_older_builds(path: Path) -> None:
    """Delete all but the latest builds of other sources for the same processor. A process that uses one keeps it."""
    others = [other for other in path.parent.glob(f"{path.stem.rpartition('-')[0]}-*.so") if other != path]
    others.sort(key=lambda other: _modification_time(other) or 0, reverse=True)
    for other in (*others[_NUM_KEPT_BUILDS:], *path.parent.glob("step-*.so")):  # step-*: the first versions
        for file in (other, _digest_path(other), _failure_path(other)):
            with contextlib.suppress(OSError):  # owned by another user, or already deleted
                file.unlink()
    for folder in path.parent.glob(f"{_WORK_PREFIX}*"):
        written = _modification_time(folder)
        if written is not None and time.time() - written > _LEFTOVER_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _modification_time(path: Path) -> float | None:
    """Return when a file was written, or None if there is no such file."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


# --- building in another process


def start_build(path: Path) -> subprocess.Popen[bytes]:
    """Start another process that builds the library and goes on if this one exits."""
    package = str(Path(__file__).parents[3])
    search_path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-P", __file__, str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C stops this process only
        env={**os.environ, "PYTHONPATH": search_path},
    )


def obstacle(path: Path) -> str | None:
    """Return why it is useless to build a library that cannot be loaded.

    There is no compiler, the folder cannot be written, or a build did not help.
    """
    try:
        _compiler_command()
    except ClearheadError as error:
        return str(error)
    folder = next(parent for parent in path.parents if parent.exists())
    if not os.access(folder, os.W_OK):
        return f"the CPU kernels need a folder, and {folder} cannot be written; set CLEARHEAD_HOME to one of your own"
    failed = _modification_time(_failure_path(path))
    if failed is not None and time.time() - failed < _FAILURE_SECONDS:
        return " ".join(_failure_path(path).read_text(encoding="utf-8").split())
    if _modification_time(path) is not None and is_intact(path):
        return f"{path} cannot be loaded; set CLEARHEAD_HOME to a folder of your own from which programs may run"
    return None


def _failure_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.failed")


if __name__ == "__main__":
    build_library(Path(sys.argv[1]))
