"""Compile the C++ kernels with the machine's own compiler, store them on disk, and load them with ctypes.

    kernels = load_kernel_library(build=True)

Without `build` nothing is compiled: the library is loaded if it is on disk, and PyTorch computes the same numbers
otherwise. The file name contains digests of the processor's features and of the sources and compiler flags.

A library is loaded only if nobody else could have written it and its SHA-256 is that in the file beside it. A damaged
one is compiled again instead of crashing the process.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from ctypes import c_int32
from pathlib import Path

import torch

from clearhead.backends.cpu_kernels.structures import SIGNATURES
from clearhead.errors import ClearheadError
from clearhead.files import write_text
from clearhead.home import home

_SOURCES = [
    Path(__file__).parent / "source" / name
    for name in ("kernels.cpp", "prompt.h", "attention.h", "linear.h", "inputs.h", "tiles.h", "vectors.h")
]
# The compiler may reorder sums, or it could not vectorize any loop; infinities and NaN keep their meaning.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
)

_WORK_PREFIX = ".compiling-"
_LEFTOVER_SECONDS = 3600  # an older work folder belongs to a killed process

_loaded: ctypes.CDLL | None = None


def load_kernel_library(build: bool = False) -> ctypes.CDLL | None:
    """Return the kernels, or None if they are not on disk and `build` is false.

    With `build`, compile them first if needed; raise ClearheadError if that fails.
    """
    global _loaded
    if _loaded is None:
        _loaded = open_library(library_path())
        if _loaded is None and build:
            compile_library(library_path())
            _loaded = open_library(library_path())
            if _loaded is None:
                raise ClearheadError(
                    f"{library_path()} was compiled but cannot be loaded; "
                    "set CLEARHEAD_HOME to a folder of yours from which programs may run"
                )
    return _loaded


def kernels_support_prompts() -> bool:
    """Return whether the kernels are loaded and process prompts faster than PyTorch, which needs AVX-512."""
    kernels = load_kernel_library()
    return kernels is not None and bool(kernels.clearhead_supports_prompts())


def is_inference() -> bool:
    """Return whether PyTorch neither records gradients nor compiles, so that a kernel may replace its operations."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


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


def open_library(path: Path) -> ctypes.CDLL | None:
    """Load a compiled library, or return None if it is missing, damaged, built for another system or not trustworthy.

    Several systems may share one home folder.
    """
    try:
        if not (_is_private(path.parent) and _is_private(path) and _digest_path(path).read_text() == _digest(path)):
            return None
        kernels = ctypes.CDLL(str(path))
        for name, arguments in SIGNATURES.items():
            function = getattr(kernels, name)
            function.argtypes, function.restype, function.errcheck = arguments, c_int32, _raise_on_failure
    except (OSError, AttributeError, ValueError):
        return None
    return kernels


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


def _raise_on_failure(code: int, *_: object) -> None:
    """Turn the non-zero return code of a kernel, which means a failed allocation, into a MemoryError."""
    if code:
        raise MemoryError("not enough memory to process this many tokens at once")


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
            "the CPU kernels need a C++ compiler, and none was found; install g++, or load the model without fast"
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
            "set CLEARHEAD_HOME to a folder of yours"
        )


def remove_older_builds(path: Path) -> None:
    """Delete builds of other sources for the same processor. A process that has already loaded one keeps it."""
    same_processor = f"{path.stem.rpartition('-')[0]}-*.so"
    for pattern in (same_processor, f"{same_processor}.sha256", "step-*.so"):  # step-*: the first versions
        for other in path.parent.glob(pattern):
            if other not in (path, _digest_path(path)):
                with contextlib.suppress(OSError):  # owned by another user, or already deleted
                    other.unlink()
    for folder in path.parent.glob(f"{_WORK_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _LEFTOVER_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
