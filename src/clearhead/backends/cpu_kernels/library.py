"""Load the compiled C++ kernels with ctypes, and have them compiled if they are missing.

    kernels = load_kernel_library(build=True)

Without `build`, the library is loaded if it is on disk, and PyTorch computes the same numbers otherwise. A missing
library is searched again only by `find_new_kernels`, which is called when a sequence begins: a text is not computed by
PyTorch up to its middle and by the kernels from there.

A library is loaded only if nobody else could have written it and its SHA-256 is that in the file beside it. A damaged
one is compiled again instead of crashing the process.
"""

import ctypes
import os
import subprocess
from ctypes import c_int32
from pathlib import Path

import torch

from clearhead.backends.cpu_kernels.compiling import build_library, is_intact, library_path, obstacle, start_build
from clearhead.backends.cpu_kernels.structures import SIGNATURES
from clearhead.errors import ClearheadError

_loaded: ctypes.CDLL | None = None
_missing: Path | None = None  # the file that was not found in the last search
_builder: subprocess.Popen[bytes] | None = None  # compiles the kernels in the background


def load_kernel_library(build: bool = False) -> ctypes.CDLL | None:
    """Return the kernels, or None if they are not on disk and `build` is false.

    With `build`, compile them first if needed, or wait for the process that does; raise ClearheadError if that fails.
    """
    global _loaded, _missing
    path = library_path()
    if _loaded is None and (build or path != _missing):
        _loaded = open_library(path)
        if _loaded is None and build:
            build_library(path)
            _loaded = open_library(path)
            if _loaded is None:
                raise ClearheadError(
                    f"{path} was compiled but cannot be loaded; "
                    "set CLEARHEAD_HOME to a folder of your own from which programs may run"
                )
        _missing = path if _loaded is None else None
    return _loaded


def find_new_kernels() -> ctypes.CDLL | None:
    """Return the kernels, also if they were compiled after the last search; None if there are none yet."""
    global _missing
    if _loaded is None and (_builder is None or _builder.poll() is not None):
        _missing = None
    return load_kernel_library()


def build_in_background() -> str | None:
    """Let another process compile the kernels if they are missing; return a note that PyTorch computes meanwhile.

    Return None if the kernels are there, or if the environment variable CLEARHEAD_COMPILE=0 forbids compiling unasked.
    """
    global _builder
    if find_new_kernels() is not None or os.environ.get("CLEARHEAD_COMPILE") == "0":
        return None
    reason = None
    if _builder is None or _builder.poll() is not None:
        try:
            reason = obstacle(library_path())
            _builder = None if reason else start_build(library_path())
        except OSError as error:
            reason = f"the CPU kernels cannot be compiled: {error}"
    if reason:
        return (
            f"{reason}; PyTorch computes instead, several times slower (to try again: --fast, or fast=True in Python; "
            "without this note: --no-fast, or fast=False)"
        )
    return (
        "the CPU kernels are being compiled in the background, once; until they are ready, PyTorch computes, several "
        "times slower (to wait for them: --fast, or fast=True in Python)"
    )


def kernels_support_prompts() -> bool:
    """Return whether the kernels are loaded and process prompts faster than PyTorch, which needs AVX-512."""
    kernels = load_kernel_library()
    return kernels is not None and bool(kernels.clearhead_supports_prompts())


def is_inference() -> bool:
    """Return whether PyTorch neither records gradients nor compiles, so that a kernel may replace its operations."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def open_library(path: Path) -> ctypes.CDLL | None:
    """Load a compiled library, or return None if it is missing, damaged, built for another system or not trustworthy.

    Several systems may share one home folder.
    """
    try:
        if not is_intact(path):
            return None
        kernels = ctypes.CDLL(str(path))
        for name, arguments in SIGNATURES.items():
            function = getattr(kernels, name)
            function.argtypes, function.restype, function.errcheck = arguments, c_int32, _raise_on_failure
    except (OSError, AttributeError, ValueError):
        return None
    return kernels


def _raise_on_failure(code: int, *_: object) -> None:
    """Turn the non-zero return code of a kernel, which means a failed allocation, into a MemoryError."""
    if code:
        raise MemoryError("not enough memory to process this many tokens at once")
