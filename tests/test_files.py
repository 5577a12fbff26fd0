"""Files: what is wrong with one is a sentence that names it, and one is written whole or not at all."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from clearhead import files
from clearhead.errors import ClearheadError
from clearhead.files import (
    atomic_write,
    check_output,
    parse_json,
    read_json,
    read_object,
    read_text,
    write_bytes,
    write_safetensors,
    write_text,
)


def test_what_is_written_is_read(tmp_path):
    write_text(tmp_path / "a.json", '{"ü": [1, 2.5, null]}')
    assert read_object(tmp_path / "a.json") == {"ü": [1, 2.5, None]}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    write_text(tmp_path / "a.json", "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "a.json", "half a character: \ud800")
    assert read_text(tmp_path / "a.json") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_name_stands_for_bytes_that_are_on_the_disk(tmp_path, monkeypatch):
    def fails(descriptor):
        assert os.fstat(descriptor).st_size == 3
        os.write(descriptor, b"")  # fails where it is open for reading only
        raise OSError(errno.EIO, "the disk is failing")

    write_bytes(tmp_path / "a", b"old")
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="the disk is failing"):
        write_bytes(tmp_path / "a", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


def test_two_processes_may_write_one_file(tmp_path):
    theirs = "import sys, pathlib, clearhead.files; clearhead.files.write_text(pathlib.Path(sys.argv[1]), 'theirs')"
    with atomic_write(tmp_path / "a") as partial:
        partial.write_text("ours")
        subprocess.run([sys.executable, "-c", theirs, tmp_path / "a"], check=True)
        assert read_text(tmp_path / "a") == "theirs"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "ours")]


def test_two_threads_may_write_one_file(tmp_path):
    with atomic_write(tmp_path / "a") as ours, atomic_write(tmp_path / "a") as theirs:
        ours.write_text("ours")
        theirs.write_text("theirs")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "ours")]


def test_the_mark_of_windows_editors_is_no_text(tmp_path):
    (tmp_path / "a.json").write_text('{"a": "\ufeff"}', encoding="utf-8-sig")
    assert read_object(tmp_path / "a.json") == {"a": "\ufeff"}


def test_tensors_are_readable_as_other_files_are(tmp_path):
    tensors = {"a": torch.arange(3)}
    write_text(tmp_path / "text", "")
    write_safetensors(tmp_path / "tensors", tensors, {"kind": "test"})
    assert (tmp_path / "tensors").stat().st_mode == (tmp_path / "text").stat().st_mode
    assert torch.equal(load_file(tmp_path / "tensors")["a"], tensors["a"])
    assert {path.name for path in tmp_path.iterdir()} == {"text", "tensors"}


def test_no_file_is_an_empty_object_only_where_one_may_be_missing(tmp_path):
    assert read_object(tmp_path / "a.json") == {}
    with pytest.raises(ClearheadError, match=r"a\.json cannot be read: No such file"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is not valid JSON: Expecting value"),
        (b"{", "is not valid JSON: Expecting property name"),
        (b"[" * 100_000, "is not valid JSON: maximum recursion depth"),
        (b"9" * 5000, "is not valid JSON: Exceeds the limit"),
        (b"\xff\xfe{", "is not UTF-8 text"),
        (b"[1]", "holds list, where an object is needed"),
        (b" " * 101, "has 101 bytes; at most 100 can be read"),
    ],
)
def test_an_unsound_file_is_one_sentence(tmp_path, monkeypatch, content, sentence):
    if b" " in content:
        monkeypatch.setattr(files, "MAX_BYTES", 100)
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ClearheadError, match=f"a.json {sentence}") as caught:
        read_object(tmp_path / "a.json")
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ClearheadError, match="cannot be read: Is a directory"):
        read_object(tmp_path)


def test_a_file_that_cannot_be_written_is_told_before_the_work(tmp_path):
    check_output(tmp_path / "page.HTML", [".html"])
    check_output(Path("page.png"), [".html", ".png"])
    with pytest.raises(ClearheadError, match=r"'page' says no kind of file; give a name that ends in \.html, \.png"):
        check_output(tmp_path / "page", [".html", ".png"])
    with pytest.raises(ClearheadError, match=r"there is no folder '.*none' to write page\.html into"):
        check_output(tmp_path / "none" / "page.html", [".html"])


def test_text_that_has_no_file():
    with pytest.raises(ClearheadError, match=r"^not valid JSON"):
        parse_json("nul")
