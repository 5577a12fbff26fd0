"""The processor's kernels (step.cpp): built once by the machine's own compiler, kept on disk, called by ctypes.

    built = kernel_library(build=True); y = multiply(x, packed)

Nobody waits for a compiler unasked: without `build` the library is used where it stands on disk, and PyTorch computes
the same otherwise. The file's name holds digests of the processor and of sources and flags.
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
from ctypes import POINTER, byref, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from clearhead.backends.packed.formats import Packed
from clearhead.errors import ClearheadError
from clearhead.home import home

SOURCES = [
    Path(__file__).parent / "source" / name
    for name in ("step.cpp", "prompt.h", "attend.h", "linear.h", "rows.h", "tiles.h", "vectors.h")
]
# Sums may be reordered, or no loop becomes vectors; infinities and NaN keep their meaning.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
)


class Matrix(ctypes.Structure):
    _fields_ = [
        ("kind", c_int32),
        ("num_groups", c_int32),
        ("num_rows", c_int64),
        ("num_columns", c_int64),
        ("values", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("bias", c_void_p),
    ]


class Norm(ctypes.Structure):
    _fields_ = [("kind", c_int32), ("epsilon", c_float), ("weight", c_void_p), ("bias", c_void_p)]


class Heads(ctypes.Structure):
    _fields_ = [
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_width", c_int32),
        ("rotary_pairs", c_int32),
        ("neighbours", c_int32),
        ("scale", c_float),
        ("query_norm", Norm),
        ("key_norm", Norm),
    ]


class KeyValueView(ctypes.Structure):
    """Addresses are plain numbers here, so that numpy sets those of all layers at once."""

    _fields_ = [
        ("keys", c_int64),
        ("values", c_int64),
        ("row_stride", c_int64),
        ("head_stride", c_int64),
        ("slot_stride", c_int64),
        ("slot", c_int64),
        ("num_slots", c_int64),
        ("allowed", c_int64),
        ("is_bfloat16", c_int64),
    ]


class Angles(ctypes.Structure):
    _fields_ = [("cosine", c_int64), ("sine", c_int64), ("row_stride", c_int64)]


class Layer(ctypes.Structure):
    _fields_ = [
        ("placement", c_int32),
        ("activation", c_int32),
        ("gated", c_int32),
        ("has_cross_attention", c_int32),
        ("heads", Heads),
        ("cross_heads", Heads),
        ("norms", Norm * 3),
        ("branch_norms", Norm * 3),
        ("projected", Matrix),
        ("output", Matrix),
        ("cross_query", Matrix),
        ("cross_output", Matrix),
        ("inner", Matrix),
        ("down", Matrix),
    ]


SIGNATURES = {
    "clearhead_step": [
        *(POINTER(Layer), c_int64, POINTER(KeyValueView), POINTER(KeyValueView), POINTER(Angles), POINTER(Norm)),
        *(c_void_p, c_int64, c_int64),
    ],
    "clearhead_linear": [
        c_void_p, c_void_p, c_int64, POINTER(Matrix), POINTER(Norm), c_int32, c_int32, c_void_p,
    ],
    "clearhead_attend": [
        c_void_p, c_void_p, c_int64, POINTER(Heads), POINTER(KeyValueView), POINTER(Angles), c_int32,
    ],
    "clearhead_attend_many": [
        c_void_p, c_void_p, c_int64, c_int64, POINTER(Heads), POINTER(KeyValueView), c_int32,
    ],
    "clearhead_unpack": [c_void_p, POINTER(Matrix), c_int32],
}  # fmt: skip
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}


# --- the library


@functools.cache
def artefact() -> Path:
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    machine = hashlib.sha256(processor().encode())
    return home() / "kernels" / f"step-{machine.hexdigest()[:12]}-{digest.hexdigest()[:24]}.so"


def processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()} {platform.node()}"


_loaded: ctypes.CDLL | None = None


def kernel_library(build: bool = False) -> ctypes.CDLL | None:
    """The kernels; None where they are not built and `build` does not ask for it."""
    global _loaded
    if _loaded is None:
        _loaded = opened(artefact())
        if _loaded is None and build:
            compile_library(artefact())
            _loaded = opened(artefact())
    return _loaded


def opened(path: Path) -> ctypes.CDLL | None:
    """None also where the file does not suit this system: a home folder may be shared by several."""
    try:
        kernels = ctypes.CDLL(str(path))
    except OSError:
        return None
    for name, arguments in SIGNATURES.items():
        function = getattr(kernels, name)
        function.argtypes, function.restype, function.errcheck = arguments, c_int32, refuse
    return kernels


def refuse(code: int, *about: object) -> None:
    if code:
        raise MemoryError("there is not enough memory for so many tokens at once")


def compile_library(path: Path) -> None:
    compiler = shlex.split(os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or "")
    if not compiler:
        raise ClearheadError("there is no C++ compiler here; install g++ for the fast step, or go without")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            unfinished = Path(folder) / "kernels.so"
            command = [*compiler, *FLAGS, str(SOURCES[0]), "-o", str(unfinished)]
            made = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            if made.returncode:
                raise ClearheadError(f"{compiler[0]} cannot build the fast step: {made.stderr.strip()[-500:]}")
            unfinished.rename(path)
    except OSError as error:
        raise ClearheadError(f"the fast step cannot be built: {error}") from None
    remove_older(path)


def remove_older(path: Path) -> None:
    """Those of other sources for the same processor; whoever runs one keeps it until he ends."""
    for other in path.parent.glob(f"{path.stem.rpartition('-')[0]}-*.so"):
        if other != path:
            with contextlib.suppress(OSError):  # not ours to remove, or gone already
                other.unlink()


# --- single products


def matrix_of(weight: Tensor | Packed, bias: Tensor | None = None) -> Matrix:
    """Points into the tensors: whoever holds it holds them too."""
    pointer = None if bias is None else bias.data_ptr()
    if isinstance(weight, Tensor):
        return Matrix(KINDS[weight.dtype], 0, *weight.shape, weight.data_ptr(), None, None, pointer)
    offsets = None if weight.offsets is None else weight.offsets.data_ptr()
    groups, quants = weight.scales.shape[1], weight.quants
    scales = weight.scales.data_ptr()
    return Matrix(KINDS[quants.dtype], groups, *weight.shape, quants.data_ptr(), scales, offsets, pointer)


def multiply(x: Tensor, weight: Tensor | Packed, bias: Tensor | None = None) -> Tensor:
    """(..., K) · (N, K) -> (..., N); by PyTorch where there is no kernel, or many rows meet plain numbers."""
    values = weight.quants if isinstance(weight, Packed) else weight
    here = x.device.type == values.device.type == "cpu" and values.dtype in KINDS
    alone = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    kernels = kernel_library() if here and alone else None
    if kernels and (isinstance(weight, Packed) or x.numel() <= kernels.clearhead_plain_rows() * x.shape[-1]):
        return apply(x, weight, bias).to(x.dtype)
    if isinstance(weight, Packed):
        weight = unpacked(weight, x.dtype)
    return functional.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))


def apply(x: Tensor, weight: Tensor | Packed, bias: Tensor | None = None) -> Tensor:
    """The same by the kernel alone, in float32."""
    kernels = kernel_library()
    assert kernels is not None
    assert x.shape[-1] == weight.shape[1], "the kernel reads as many numbers as a row of W has"
    rows = x.float().contiguous().view(-1, x.shape[-1])
    added = None if bias is None else bias.float().contiguous()
    weight = weight.contiguous() if isinstance(weight, Tensor) else weight
    y = rows.new_empty(len(rows), weight.shape[0])
    kernels.clearhead_linear(
        y.data_ptr(), rows.data_ptr(), len(rows), byref(matrix_of(weight, added)), byref(Norm()), 0, 0, None
    )
    return y.view(*x.shape[:-1], weight.shape[0])


def unpacked(packed: Packed, dtype: torch.dtype) -> Tensor:
    plain = packed.quants.device.type != "cpu" or torch.compiler.is_compiling()
    kernels = None if plain else kernel_library()
    if kernels is None or dtype not in (torch.float32, torch.bfloat16):
        return packed.unpack(dtype)
    y = torch.empty(packed.shape, dtype=dtype, device="cpu")
    kernels.clearhead_unpack(y.data_ptr(), byref(matrix_of(packed)), dtype == torch.bfloat16)
    return y
