"""Reading and writing files: every error names the file, and a file is written completely or not at all."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead import files
from clearhead.errors import ClearheadError
from clearhead.files import (
    atomic_write,
    check_output_path,
    parse_json,
    read_json,
    read_json_object,
    read_text,
    write_bytes,
    write_text,
)


def test_written_json_is_read_back(tmp_path):
    write_text(tmp_path / "a.json", '{"ü": [1, 2.5, null]}')
    assert read_json_object(tmp_path / "a.json") == {"ü": [1, 2.5, None]}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path):
    write_text(tmp_path / "a.json", "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "a.json", "half a character: \ud800")
    assert read_text(tmp_path / "a.json") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_file_is_renamed_only_after_its_bytes_are_on_disk(tmp_path, monkeypatch):
    def failing_fsync(descriptor):
        assert os.fstat(descriptor).st_size == 3
        os.write(descriptor, b"")  # fails if the file is open for reading only
        raise OSError(errno.EIO, "the disk is failing")

    write_bytes(tmp_path / "a", b"old")
    monkeypatch.setattr(os, "fsync", failing_fsync)
    with pytest.raises(OSError, match="the disk is failing"):
        write_bytes(tmp_path / "a", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


def test_two_processes_can_write_the_same_file(tmp_path):
    other = "import sys, pathlib, clearhead.files; clearhead.files.write_text(pathlib.Path(sys.argv[1]), 'theirs')"
    with atomic_write(tmp_path / "a") as partial:
        partial.write_text("ours")
        subprocess.run([sys.executable, "-c", other, tmp_path / "a"], check=True)
        assert read_text(tmp_path / "a") == "theirs"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "ours")]


def test_two_threads_can_write_the_same_file(tmp_path):
    with atomic_write(tmp_path / "a") as ours, atomic_write(tmp_path / "a") as theirs:
        ours.write_text("ours")
        theirs.write_text("theirs")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "ours")]


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path):
    (tmp_path / "a.json").write_text('{"a": "\ufeff"}', encoding="utf-8-sig")
    assert read_json_object(tmp_path / "a.json") == {"a": "\ufeff"}


def test_only_read_json_object_accepts_a_missing_file(tmp_path):
    assert read_json_object(tmp_path / "a.json") == {}
    with pytest.raises(ClearheadError, match=r"a\.json cannot be read: No such file"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON: Expecting value"),
        (b"{", "is not valid JSON: Expecting property name"),
        (b"[" * 100_000, "is not valid JSON: maximum recursion depth"),
        (b"9" * 5000, "is not valid JSON: Exceeds the limit"),
        (b"\xff\xfe{", "is not UTF-8 text"),
        (b"[1]", "contains a list; it must contain a JSON object"),
        (b" " * 101, "has 101 bytes; at most 100 can be read"),
    ],
)
def test_an_invalid_file_raises_one_sentence(tmp_path, monkeypatch, content, message):
    if b" " in content:
        monkeypatch.setattr(files, "MAX_JSON_BYTES", 100)
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ClearheadError, match=f"a.json {message}") as caught:
        read_json_object(tmp_path / "a.json")
    assert "\n" not in str(caught.value)


def test_a_folder_cannot_be_read_as_a_file(tmp_path):
    with pytest.raises(ClearheadError, match="is not a regular file but a folder"):
        read_json_object(tmp_path)


def test_check_output_path_requires_a_known_extension_and_an_existing_folder(tmp_path):
    check_output_path(tmp_path / "page.HTML", [".html"])
    check_output_path(Path("page.png"), [".html", ".png"])
    with pytest.raises(ClearheadError, match=r"'page' has an unsupported extension; use \.html or \.png"):
        check_output_path(tmp_path / "page", [".html", ".png"])
    with pytest.raises(ClearheadError, match=r"the folder '.*none' does not exist; create it to write page\.html"):
        check_output_path(tmp_path / "none" / "page.html", [".html"])


def test_parse_json_without_a_subject():
    with pytest.raises(ClearheadError, match=r"^the text is not valid JSON"):
        parse_json("nul")
