"""Files to texts, and what is said of those that cannot be read."""

import gzip
import json
import os

import pytest

from clearhead.data.sources import read_chats, read_lines, read_parallel, read_table, read_text, read_texts
from clearhead.errors import ClearheadError

TEXT = "One line.\nAnother.\n\nA paragraph.\n"


def test_units_of_a_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT.encode())
    assert list(read_texts(path)) == [TEXT]
    assert list(read_texts(path, unit="line")) == ["One line.", "Another.", "A paragraph."]
    assert list(read_texts(path, unit="paragraph")) == ["One line.\nAnother.", "A paragraph."]
    with pytest.raises(ClearheadError, match="did you mean 'line'"):
        list(read_texts(path, unit="lines"))


def test_a_folder_in_the_order_of_names_gz_and_jsonl_too(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "sub" / "c.jsonl").write_text('{"text": "c1"}\n\n{"text": "c2"}\n')
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a"))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert list(read_texts(tmp_path)) == ["a", "b", "c1", "c2"]


def test_lines_end_at_newlines_only(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\u2028still one\x0b\r\ntwo\n\nend".encode())
    assert list(read_lines(path)) == ["one\u2028still one\x0b", "two", "", "end"]
    assert read_text(path) == "one\u2028still one\x0b\r\ntwo\n\nend"


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("read", [lambda path: list(read_lines(path)), read_text])
def test_a_file_that_is_not_utf8_is_named_with_the_place(tmp_path, suffix, read):
    content = "Grüße\nund ".encode() + b"\xfc" + b"ber\n"
    path = tmp_path / f"latin.txt{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(ClearheadError, match=rf"latin.txt{suffix} is not UTF-8 text: byte 0xfc at offset 12;"):
        read(path)


def test_broken_gzip_missing_files_and_empty_folders(tmp_path):
    whole = gzip.compress(TEXT.encode() * 100)
    (tmp_path / "cut.txt.gz").write_bytes(whole[:-20])
    (tmp_path / "none.txt.gz").write_bytes(b"plain text")
    with pytest.raises(ClearheadError, match="not a whole gzip file"):
        read_text(tmp_path / "cut.txt.gz")
    with pytest.raises(ClearheadError, match="cannot be read: Not a gzipped file"):
        read_text(tmp_path / "none.txt.gz")
    with pytest.raises(ClearheadError, match="does not exist"):
        list(read_texts(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ClearheadError, match="holds no file to read"):
        list(read_texts(tmp_path / "empty"))


def test_what_another_program_writes_is_read_as_it_comes():
    """As `<(zcat …)` of a shell gives it."""
    end, other = os.pipe()
    os.write(other, b"a b\nc\n")
    os.close(other)
    assert list(read_texts(f"/dev/fd/{end}", "line")) == ["a b", "c"]
    os.close(end)


def test_parallel_files(tmp_path):
    (tmp_path / "en").write_text("a dog\na cat\n")
    (tmp_path / "de.gz").write_bytes(gzip.compress(b"ein Hund\neine Katze\n"))
    assert read_parallel(tmp_path / "en", tmp_path / "de.gz") == [("a dog", "ein Hund"), ("a cat", "eine Katze")]
    (tmp_path / "fr").write_text("un chien\n")
    with pytest.raises(ClearheadError, match=r"en has 2 lines and .*fr has 1;"):
        read_parallel(tmp_path / "en", tmp_path / "fr")
    (tmp_path / "empty").write_text("")
    with pytest.raises(ClearheadError, match="empty is empty; there is nothing to read"):
        read_parallel(tmp_path / "empty", tmp_path / "empty")


def test_tables(tmp_path):
    path = tmp_path / "table.tsv"
    path.write_text("1\thello\tHH AH\n2\tworld\tW ER\n")
    assert read_table(path, 1, 2) == [("hello", "HH AH"), ("world", "W ER")]
    with pytest.raises(ClearheadError, match=r"line 1 of .*table.tsv has 3 tab-separated columns"):
        read_table(path, 1, 3)
    path.write_bytes(b"\xef\xbb\xbfa\tb\r\n\r\n\tc\r\n")
    assert read_table(path) == [("a", "b"), ("", "c")]


def test_chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    assert read_chats(path) == [messages]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 of .* is not valid JSON"),
        ("[1]", "line 1 of .* is not a JSON object"),
        ("[" * 100_000, "line 1 of .* is not valid JSON"),
        ('{"body": "x"}', "line 1 of .* has no text under 'text'; its keys are: body"),
        (r'{"text": "cut \uD83D"}', "line 1 of .* has half a character"),
    ],
)
def test_json_lines_that_cannot_be_read(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(line)
    with pytest.raises(ClearheadError, match=message):
        list(read_texts(path))


def test_chats_without_messages(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [{"role": "user"}]}\n')
    with pytest.raises(ClearheadError, match=r'line 1 of .* has no "messages"'):
        read_chats(path)


def test_names_of_files_may_be_in_capitals_and_both_halves_make_a_character(tmp_path):
    (tmp_path / "A.JSONL").write_text('{"text": "\\ud83d\\ude42"}\n')
    (tmp_path / "B.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "b"}\n'))
    assert list(read_texts(tmp_path)) == ["\N{SLIGHTLY SMILING FACE}", "b"]
