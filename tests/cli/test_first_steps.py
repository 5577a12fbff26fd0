"""Mistakes and surroundings of newcomers: files in the place of texts, read-only folders, quantized models."""

import errno
import os
import sys

import pytest

from clearhead.backends.cpu_kernels.compiling import obstacle
from clearhead.checkpoint import save_folder
from clearhead.cli import main
from clearhead.cli.checks import check_model_options
from clearhead.errors import ClearheadError
from tests.checkpoint.quantized_files import QUANTIZERS, quantize_folder
from tests.checkpoint.tiny import tiny_network
from tests.cli.test_commands import clearhead, text_generator  # noqa: F401


@pytest.mark.parametrize(("command", "how"), [("generate", "- <"), ("score", "--file"), ("trace", "- <")])
def test_a_text_that_is_the_name_of_a_file_prints_a_note(clearhead, text_generator, tmp_path, command, how):  # noqa: F811
    path = tmp_path / "my text.txt"
    path.write_text("content")
    note = f"note: the text is '{path}', the name of a file; to use what the file contains: {how} '{path}'\n"
    assert note in clearhead(command, text_generator[1], path).stderr
    assert "the name of a file" not in clearhead(command, text_generator[1], "my text.txt").stderr


def test_a_traced_pipe_loses_one_final_newline(clearhead, text_generator):  # noqa: F811
    piped = clearhead("trace", text_generator[1], "-", "--json", stdin="ab\n").stdout
    assert piped == clearhead("trace", text_generator[1], "ab", "--json").stdout


@pytest.mark.parametrize(
    ("number", "path", "expected"),
    [
        (
            errno.EROFS,
            "/a/course.html.938bd7c6.partial",
            "/a/course.html cannot be written: Read-only file system; choose",
        ),
        (errno.ENOSPC, "/a/map.png", "/a/map.png cannot be written: No space left on device; choose another folder or"),
        (errno.EACCES, "/a/map.png", "/a/map.png cannot be used: Permission denied"),
        (errno.EIO, None, "[Errno 5] Input/output error"),
    ],
)
def test_an_error_of_the_disk_is_a_sentence(monkeypatch, capsys, number, path, expected):
    def fail(*_, **options):
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(sys, "argv", ["clearhead", "list"])
    monkeypatch.setattr("clearhead.catalog.list_entries", fail)
    with pytest.raises(SystemExit, match="1"):
        main()
    error = capsys.readouterr().err
    assert error.startswith(f"error: {expected}")
    assert error.count("\n") == 1


def test_no_kernels_are_promised_if_their_folder_cannot_be_written(tmp_path, monkeypatch):
    path = tmp_path / "missing" / "folder" / "kernels.so"
    monkeypatch.setenv("CXX", sys.executable)  # any program stands for the compiler
    assert obstacle(path) is None
    monkeypatch.setattr(os, "access", lambda folder, mode: folder != tmp_path)
    assert f"{tmp_path} cannot be written; set CLEARHEAD_HOME" in obstacle(path)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantized_folders_may_be_run_from_their_stored_blocks(tmp_path, name):
    save_folder(tiny_network(width=64, feed_forward=96), tmp_path)
    with pytest.raises(ClearheadError, match=r"which only \.gguf files and quantized folders have; use --weights int8"):
        check_model_options(str(tmp_path), weights="stored")
    quantize_folder(tmp_path, name)
    assert check_model_options(str(tmp_path), weights="stored") == tmp_path
