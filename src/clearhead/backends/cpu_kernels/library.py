"""Compile the C++ kernels with the machine's own compiler, store them on disk, and load them with ctypes.

    kernels = load_kernel_library(build=True)

Without `build` nothing is compiled: the library is loaded if it is on disk, and PyTorch computes the same numbers
otherwise. The file name contains digests of the processor's features and of the sources and compiler flags.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from ctypes import c_int32
from pathlib import Path

import torch

from clearhead.backends.cpu_kernels.structures import SIGNATURES
from clearhead.errors import ClearheadError
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
    """Load a compiled library, or return None if it is missing or built for another system.

    Several systems may share one home folder.
    """
    try:
        kernels = ctypes.CDLL(str(path))
    except OSError:
        return None
    for name, arguments in SIGNATURES.items():
        function = getattr(kernels, name)
        function.argtypes, function.restype, function.errcheck = arguments, c_int32, _raise_on_failure
    return kernels


def _raise_on_failure(code: int, *_: object) -> None:
    """Turn the non-zero return code of a kernel, which means a failed allocation, into a MemoryError."""
    if code:
        raise MemoryError("not enough memory to process this many tokens at once")


def compile_library(path: Path) -> None:
    """Compile the kernels to `path` and delete older builds; raise ClearheadError if there is no working compiler."""
    compiler = shlex.split(os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or "")
    if not compiler:
        raise ClearheadError(
            "the CPU kernels need a C++ compiler, and none was found; install g++, or load the model without fast"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            unfinished = Path(folder) / "kernels.so"
            command = [*compiler, *FLAGS, str(_SOURCES[0]), "-o", str(unfinished)]
            result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            if result.returncode:
                message = result.stderr.strip()[-500:]
                raise ClearheadError(f"{compiler[0]} cannot compile the CPU kernels: {message}")
            unfinished.rename(path)
    except OSError as error:
        raise ClearheadError(f"the CPU kernels cannot be compiled: {error}") from None
    remove_older_builds(path)


def remove_older_builds(path: Path) -> None:
    """Delete builds of other sources for the same processor. A process that has already loaded one keeps it."""
    for other in path.parent.glob(f"{path.stem.rpartition('-')[0]}-*.so"):
        if other != path:
            with contextlib.suppress(OSError):  # owned by another user, or already deleted
                other.unlink()
