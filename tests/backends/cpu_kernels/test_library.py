"""The kernel library: compiling and loading it, calling kernels directly, and what happens without memory."""

import os
import shutil
import subprocess
import sys
import time
from ctypes import byref
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from clearhead.architecture import Rope
from clearhead.backends.cpu_kernels import compiling, library
from clearhead.backends.cpu_kernels.attention import cpu_attention
from clearhead.backends.cpu_kernels.products import multiply_in_kernel
from clearhead.backends.cpu_kernels.structures import (
    Heads,
    KeyValueView,
    LayerStruct,
    MatrixStruct,
    NormStruct,
    RotationAngles,
)
from clearhead.errors import ClearheadError
from clearhead.model import Mask, Scoring
from clearhead.model.positions import make_rotation

# --- compiling and loading


@pytest.fixture
def unloaded(tmp_path, monkeypatch):
    """Let the library be compiled to, and loaded from, a path that does not exist yet; return the path."""
    path = tmp_path / "kernels" / "built.so"
    monkeypatch.setattr(library, "library_path", lambda: path)
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(library, "_missing", None)
    monkeypatch.setattr(library, "_builder", None)
    return path


def test_the_library_is_compiled_once_and_loaded_afterwards(unloaded, monkeypatch):
    monkeypatch.setattr(compiling, "FLAGS", (*compiling.FLAGS, "-O0"))  # a real compiler, but a fast one
    unloaded.parent.mkdir(mode=0o700)
    unloaded.write_bytes(b"\x7fELF and no more, as after a crash")
    assert library.load_kernel_library() is None
    try:
        assert library.load_kernel_library(build=True) is not None
    except ClearheadError as error:
        pytest.skip(str(error))
    written = unloaded.stat().st_mtime_ns
    monkeypatch.setattr(library, "_loaded", None)
    assert library.load_kernel_library() is not None
    assert unloaded.stat().st_mtime_ns == written
    assert sorted(path.name for path in unloaded.parent.iterdir()) == ["built.so", "built.so.sha256"]


def test_a_library_of_another_system_is_ignored(unloaded):
    unloaded.parent.mkdir()
    unloaded.write_bytes(b"not a shared library of this system")
    assert library.load_kernel_library() is None


def truncate(path):
    path.write_bytes(path.read_bytes()[:5000])


def replace_library_and_forget_digest(path):
    path.with_name(path.name + ".sha256").unlink()


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        replace_library_and_forget_digest,
        lambda path: path.chmod(0o720),
        lambda path: path.parent.chmod(0o777),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
    ],
)
def test_a_damaged_or_untrusted_library_is_not_loaded(kernels, unloaded, damage):
    built = compiling.library_path()
    unloaded.parent.mkdir()
    shutil.copy(built, unloaded)
    shutil.copy(f"{built}.sha256", f"{unloaded}.sha256")
    damage(unloaded)
    assert library.load_kernel_library() is None


def test_a_library_of_another_user_is_not_loaded(kernels, unloaded, monkeypatch):
    built = compiling.library_path()
    monkeypatch.setattr(compiling.os, "getuid", lambda: built.stat().st_uid + 1)
    if built.stat().st_uid != 0:  # files of root are trusted
        assert library.open_library(built) is None


def test_kernels_are_not_compiled_to_a_folder_that_others_can_write_to(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "_is_private", lambda path: False)
    with pytest.raises(ClearheadError, match="because other users can write there; set CLEARHEAD_HOME"):
        compiling.compile_library(tmp_path / "kernels.so")


def test_an_unclosed_quote_in_the_compiler_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", 'g++ "')
    with pytest.raises(
        ClearheadError, match=r"CXX is 'g\+\+ \"', which is not a valid command \(No closing quotation\)"
    ):
        compiling.compile_library(tmp_path / "kernels.so")


def test_a_missing_compiler_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ClearheadError, match="need a C\\+\\+ compiler, and none was found; install g\\+\\+"):
        compiling.compile_library(tmp_path / "kernels.so")


def test_a_failing_compiler_is_named_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ClearheadError, match="false cannot compile the CPU kernels"):
        compiling.compile_library(tmp_path / "kernels.so")
    assert not list(tmp_path.glob("*.so"))


def test_the_compiler_variable_may_contain_arguments_and_may_name_a_missing_program(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "false -x")
    with pytest.raises(ClearheadError, match="false cannot compile"):
        compiling.compile_library(tmp_path / "kernels.so")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ClearheadError, match=r"the CPU kernels cannot be compiled: .*no-such-compiler"):
        compiling.compile_library(tmp_path / "kernels.so")


def test_all_but_the_latest_builds_for_the_same_processor_are_deleted(tmp_path):
    """Two versions of Clearhead that are used in turn do not delete each other's kernels."""
    latest = [f"cpu-a-{number}.so" for number in range(3, 6)]
    kept = {"cpu-a-2.so", "cpu-a-2.so.sha256", "cpu-b-1.so", "other.so", *latest, f"{latest[0]}.sha256"}
    for name in kept | {"cpu-a-1.so", "cpu-a-1.so.sha256", "cpu-a-1.so.failed", "step-0123.so"}:
        (tmp_path / name).touch()
    os.utime(tmp_path / "cpu-a-1.so", (1, 1))
    leftover, current = tmp_path / ".compiling-a", tmp_path / ".compiling-b"
    leftover.mkdir()
    current.mkdir()
    os.utime(leftover, (0, 0))
    compiling.remove_older_builds(tmp_path / "cpu-a-2.so")
    assert {path.name for path in tmp_path.iterdir()} == kept | {current.name}


# --- building in the background

COMPILER = """#!/bin/sh
echo once >> {log}
sleep 1
while [ "$1" != -o ]; do shift; done
cp {built} "$2"
"""


@pytest.fixture
def slow_compiler(kernels, tmp_path, monkeypatch):
    """A compiler that takes a second and copies the kernels that are already built; return the log of its calls."""
    program, log = tmp_path / "compiler", tmp_path / "log"
    program.write_text(COMPILER.format(log=log, built=compiling.library_path()))
    program.chmod(0o700)
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.delenv("CLEARHEAD_COMPILE", raising=False)
    return log


def test_a_background_build_is_announced_and_its_kernels_are_found_when_a_sequence_begins(slow_compiler, unloaded):
    note = library.build_in_background()
    assert note.startswith("the CPU kernels are being compiled in the background, once; until they are ready, PyTorch")
    assert library.build_in_background() == note  # and no second process is started
    assert library.find_new_kernels() is None
    library._builder.wait(60)
    assert library.load_kernel_library() is None  # in the middle of a sequence nothing changes
    assert library.find_new_kernels() is not None
    assert library.load_kernel_library() is not None
    assert library.build_in_background() is None
    assert slow_compiler.read_text() == "once\n"


def test_waiting_for_a_background_build_does_not_compile_again(slow_compiler, unloaded):
    library.build_in_background()
    deadline = time.monotonic() + 60
    while not slow_compiler.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert library.load_kernel_library(build=True) is not None
    assert library._builder.wait(60) == 0
    assert slow_compiler.read_text() == "once\n"


def test_several_processes_that_build_at_once_compile_once(slow_compiler, unloaded):
    command = [sys.executable, "-P", compiling.__file__, str(unloaded)]
    environment = os.environ | {"PYTHONPATH": str(Path(compiling.__file__).parents[3])}
    for process in [subprocess.Popen(command, env=environment) for _ in range(4)]:
        assert process.wait(120) == 0
    assert slow_compiler.read_text() == "once\n"
    assert library.open_library(unloaded) is not None


def test_a_failed_background_build_is_not_repeated_until_it_is_asked_for(unloaded, slow_compiler, monkeypatch):
    working = os.environ["CXX"]
    monkeypatch.setenv("CXX", "false")
    assert "in the background" in library.build_in_background()
    assert library._builder.wait(60) != 0
    note = library.build_in_background()
    assert note.startswith("false cannot compile the CPU kernels")
    assert "PyTorch computes instead" in note
    monkeypatch.setenv("CXX", working)
    assert library.load_kernel_library(build=True) is not None
    assert not list(unloaded.parent.glob("*.failed"))


def test_without_a_compiler_the_note_says_what_to_install(unloaded, slow_compiler, monkeypatch):
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    assert "none was found; install g++" in library.build_in_background()
    assert library._builder is None


def test_compiling_unasked_can_be_forbidden(unloaded, slow_compiler, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_COMPILE", "0")
    assert library.build_in_background() is None
    assert library._builder is None


# --- calling kernels


@pytest.fixture
def kernel_library(kernels):
    torch.manual_seed(0)
    return library.load_kernel_library()


@pytest.mark.parametrize("num_slots", [1, 31, 32, 33, 64, 65, 200, 300, 1000])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 8), (4, 2, 16), (9, 3, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_one_token_over_any_number_of_slots(kernel_library, num_slots, heads, kv_heads, width, dtype):
    batch, capacity = 2, num_slots + 9
    cache = torch.randn(2, batch, kv_heads, capacity, width).to(dtype)
    projected, y = torch.randn(batch, (heads + 2 * kv_heads) * width), torch.empty(batch, heads * width)
    allowed = torch.rand(batch, num_slots) > 0.2
    allowed[:, -1] = True
    view = KeyValueView(slot=num_slots - 1, num_slots=num_slots, allowed=allowed.data_ptr())
    view.point_to(*cache)
    rotation = make_rotation(Rope(), torch.full((1, 1), num_slots - 1), width, torch.float32)
    angles = RotationAngles(rotation.cosine.data_ptr(), rotation.sine.data_ptr(), 0)
    sizes = Heads(heads, kv_heads, width, width // 2, 0, 0.3, NormStruct(), NormStruct())
    q, k, v = projected.split([heads * width, kv_heads * width, kv_heads * width], dim=1)
    expected = cache.clone()
    expected[0, :, :, num_slots - 1] = rotation.rotate(k.view(batch, kv_heads, 1, width))[:, :, 0]
    expected[1, :, :, num_slots - 1] = v.view(batch, kv_heads, width)
    kernel_library.clearhead_attend_token(
        y.data_ptr(), projected.data_ptr(), batch, byref(sizes), byref(view), byref(angles), 0
    )
    torch.testing.assert_close(cache[:, :, :, :num_slots], expected[:, :, :, :num_slots], atol=1e-2, rtol=1e-2)
    keys, values = expected[:, :, :, :num_slots].float()
    queries = rotation.rotate(q.view(batch, heads, 1, width))
    reference = functional.scaled_dot_product_attention(
        queries, keys, values, allowed[:, None, None], scale=0.3, enable_gqa=True
    )
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(y, reference.transpose(1, 2).flatten(1), atol=tolerance, rtol=tolerance)


def test_a_failed_allocation_raises_a_memory_error(kernel_library):
    too_many = 2**50  # rows or slots: no process can address them
    heads, view, norm = byref(Heads(1, 1, 64)), byref(KeyValueView(num_slots=too_many)), byref(NormStruct())
    matrix = MatrixStruct(num_rows=64, num_columns=64)
    layers = (LayerStruct * 1)(
        LayerStruct(query_key_value=matrix, attention_output=matrix, gate_and_up=matrix, down=matrix)
    )
    calls = [
        (
            *(kernel_library.clearhead_run_layers, layers, 1, KeyValueView(), None, RotationAngles(), norm, None),
            *(too_many, 1),
        ),
        (kernel_library.clearhead_linear, None, None, too_many, byref(matrix), norm, 0, 0, None),
        (kernel_library.clearhead_attend_token, None, None, 1, heads, view, byref(RotationAngles()), 0),
        (kernel_library.clearhead_attend_prompt, None, None, 1, 1, heads, view, 0),
    ]
    for kernel, *arguments in calls:
        with pytest.raises(MemoryError, match="not enough memory"):
            kernel(*arguments)


def test_the_kernels_do_not_depend_on_the_default_dtype_of_torch(kernel_library):
    x, weight = torch.randn(3, 64), torch.randn(7, 64)
    q, k, v = (torch.randn(1, 2, 5, 16) for _ in range(3))
    scoring = Scoring(mask=Mask(causal=True), scale=0.25)
    expected = multiply_in_kernel(x, weight), cpu_attention(q, k, v, scoring)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            found = multiply_in_kernel(x, weight), cpu_attention(q, k, v, scoring)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
