"""Read a few mutated files of every kind; see `mutated_files` for the full number. Broken readers must be found."""

import os
from pathlib import Path

import pytest

from clearhead.errors import ClearheadError
from tests.slow.mutated_files import read_all, read_kind
from tests.slow.readers import Kind

pytestmark = pytest.mark.slow


def test_no_mutated_file_breaks_a_promise(tmp_path):
    counts, findings = read_all(2000, tmp_path)
    assert [str(finding) for finding in findings] == []
    assert counts["files"] == 2000
    assert counts["accepted"] > 200
    assert counts["refused"] > 1000


def refuse(*_):
    raise ClearheadError("no")


def hang(*_):
    while True:
        pass


def grow(*_):
    b"a" * (200 << 20)  # bytes that are written, not only reserved


def refuse_with_surrogate(*_):
    raise ClearheadError("\ud800")


BROKEN = {
    "KeyError": lambda *_: {}["a"],
    "AssertionError": lambda *_: pytest.fail("nonsense was accepted", pytrace=False),
    "exit code -6": lambda *_: os.abort(),
    "not finished after": hang,
    "the process grew by": grow,
    "UnicodeEncodeError": refuse_with_surrogate,
    "SystemExit": lambda *_: exit(3),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_a_broken_reader_is_found(tmp_path, problem):
    (tmp_path / "file").write_bytes(b"content")
    kind = Kind("broken", tmp_path, {"file": "binary"}, BROKEN[problem])
    _, findings = read_kind(kind, 2, tmp_path / "log")
    expected = "Failed" if problem == "AssertionError" else problem
    assert [finding.number for finding in findings] == [0, 1]
    assert all(expected in finding.problem for finding in findings)
    assert (tmp_path / "file").read_bytes() == b"content"


def test_a_reader_that_refuses_or_accepts_breaks_nothing(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    for read, num_accepted in ((refuse, 0), (lambda *_: None, 3)):
        assert read_kind(Kind("sound", tmp_path, {"file": "text"}, read), 3, Path(tmp_path) / "log") == (
            num_accepted,
            [],
        )
