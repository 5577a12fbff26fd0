"""Test reading safetensors files: all dtypes as the library reads them, and no damaged header is accepted."""

import json
import os

import pytest
import safetensors.torch
import torch

from clearhead.errors import ClearheadError
from clearhead.files import write_text
from clearhead.tensor_files import SafetensorsFile, read_safetensors, write_safetensors

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


def write_header(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def test_every_dtype_is_read_as_the_library_reads_it(tmp_path):
    path = tmp_path / "x.safetensors"
    shapes = [(), (3,), (2, 3), (0, 4), (2, 1, 5)]
    tensors = {
        f"{dtype}-{number}": torch.randn(shape).mul(9).to(dtype)
        for dtype in DTYPES
        for number, shape in enumerate(shapes)
    }
    safetensors.torch.save_file(tensors, path, {"a": "b"})
    found, metadata = read_safetensors(path)
    assert metadata == {"a": "b"}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].double(), tensor.double())


def test_rows_are_read_alone(tmp_path):
    tensor = torch.arange(24).view(4, 3, 2)
    safetensors.torch.save_file({"x": tensor, "first": torch.zeros(5)}, tmp_path / "x")
    file = SafetensorsFile(tmp_path / "x")
    assert torch.equal(file.read_rows("x", 1, 3), tensor[1:3])
    assert file.shape("x") == (4, 3, 2)
    assert file.dtype_name("x") == "I64"


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry()}, None),
        ({"a": entry(offsets=(0, 4))}, "does not fit its data_offsets"),
        ({"a": entry(shape=(3,))}, "does not fit its data_offsets"),
        ({"a": entry(shape=(2**62, 2**62))}, "does not fit its data_offsets"),
        ({"a": entry(shape=(-2,))}, "needs a dtype, a shape and two data_offsets"),
        ({"a": entry(shape=(2.0,))}, "needs a dtype, a shape and two data_offsets"),
        ({"a": entry(shape=(True, 2))}, "needs a dtype, a shape and two data_offsets"),
        ({"a": entry(offsets=(0, 8, 8))}, "needs a dtype, a shape and two data_offsets"),
        ({"a": entry(offsets=(8, 16))}, "does not fit its data_offsets"),
        ({"a": entry("F32", (1,), (0, 4))}, "its tensors have 4 bytes, but the file has 8"),
        ({"a": entry("F32", (1,), (4, 8))}, "belong to no tensor or to two"),
        ({"a": entry(), "b": entry()}, "belong to no tensor or to two"),
        ({"a": entry(), "\ud800": entry("F32", (0,), (8, 8))}, "unpaired surrogate"),
        ({"a": entry(), "__metadata__": {"a": 1}}, "metadata must be an object of texts"),
        ({"a": entry(), "__metadata__": []}, "metadata must be an object of texts"),
        ({"a": 3}, "needs a dtype"),
        ([], "not a JSON object"),
        (b"{", "not valid JSON"),
        (b"\xff{}", "not UTF-8"),
    ],
)
def test_a_header_that_does_not_describe_the_file_is_rejected(tmp_path, header, message):
    path = write_header(tmp_path / "x", header, bytes(8))
    if message is None:
        assert torch.equal(SafetensorsFile(path).read("a"), torch.zeros(2))
        return
    with pytest.raises(ClearheadError, match=f"x is not a complete safetensors file: .*{message}"):
        SafetensorsFile(path)


@pytest.mark.parametrize("length", [10**3, 2**40, 2**64 - 1])
def test_a_header_longer_than_the_file_is_rejected(tmp_path, length):
    with pytest.raises(ClearheadError, match="its header has"):
        SafetensorsFile(write_header(tmp_path / "x", {}, length=length))


@pytest.mark.parametrize("num_bytes", [0, 7])
def test_a_file_without_a_header_is_rejected(tmp_path, num_bytes):
    (tmp_path / "x").write_bytes(bytes(num_bytes))
    with pytest.raises(ClearheadError, match=f"it has {num_bytes} bytes"):
        SafetensorsFile(tmp_path / "x")


def test_other_bytes_than_0_and_1_are_true(tmp_path):
    path = write_header(tmp_path / "x", {"a": entry("BOOL", (4,), (0, 4))}, bytes([0, 1, 2, 255]))
    found = SafetensorsFile(path).read("a")
    assert found.view(torch.uint8).tolist() == [0, 1, 1, 1]


def test_an_impossible_shape_and_an_unknown_dtype_are_rejected_when_they_are_read(tmp_path):
    header = {"a": entry("F32", (2**62, 2**62, 0), (0, 0)), "b": entry("F4", (3,), (0, 8))}
    file = SafetensorsFile(write_header(tmp_path / "x", header, bytes(8)))
    with pytest.raises(ClearheadError, match="the tensor a has an impossible shape"):
        file.read("a")
    with pytest.raises(ClearheadError, match="the tensor b has the dtype F4, which is not supported"):
        file.read("b")


def test_a_file_that_is_cut_short_after_it_was_opened_gives_an_error(tmp_path):
    safetensors.torch.save_file({"a": torch.zeros(10**5)}, tmp_path / "x")
    file = SafetensorsFile(tmp_path / "x")
    os.truncate(tmp_path / "x", 1000)
    with pytest.raises(ClearheadError, match="the file has become shorter since its header was read"):
        file.read("a")


def test_a_tensor_stays_after_its_file_is_cut_short(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(10**5)}, tmp_path / "x")
    tensor = SafetensorsFile(tmp_path / "x").read("a")
    os.truncate(tmp_path / "x", 0)
    assert tensor.sum() == 10**5


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe"])
def test_what_is_not_a_file_is_rejected(tmp_path, kind):
    path = tmp_path / "x"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(ClearheadError, match=r"x (cannot be read|is not a regular file)"):
        read_safetensors(path)


def test_safetensors_files_have_the_permissions_of_other_files(tmp_path):
    tensors = {"a": torch.arange(3)}
    write_text(tmp_path / "text", "")
    write_safetensors(tmp_path / "tensors", tensors, {"kind": "test"})
    assert (tmp_path / "tensors").stat().st_mode == (tmp_path / "text").stat().st_mode
    assert torch.equal(safetensors.torch.load_file(tmp_path / "tensors")["a"], tensors["a"])
    assert {path.name for path in tmp_path.iterdir()} == {"text", "tensors"}


def test_the_library_reads_what_is_written_in_every_dtype(tmp_path):
    tensors = {str(dtype): torch.randn(3, 2).mul(9).to(dtype) for dtype in DTYPES} | {"none": torch.zeros(0, 4)}
    tensors["transposed"] = torch.arange(6).view(2, 3).T
    write_safetensors(tmp_path / "x", tensors)
    found = safetensors.torch.load_file(tmp_path / "x")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name].double(), tensor.double()) for name, tensor in tensors.items())


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    write_safetensors(tmp_path / "x", {"a": torch.zeros(2)})
    with pytest.raises(KeyError):
        write_safetensors(tmp_path / "x", {"a": torch.zeros(2, dtype=torch.complex64)})
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert read_safetensors(tmp_path / "x")[0]["a"].dtype == torch.float32
