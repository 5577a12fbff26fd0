"""Test reading texts from files, and the errors for files that cannot be read."""

import gzip
import json
import os
import tracemalloc

import pytest

from clearhead.data import sources
from clearhead.data.sources import read_chats, read_lines, read_parallel, read_table, read_text, read_texts
from clearhead.errors import ClearheadError

TEXT = "One line.\nAnother.\n\nA paragraph.\n"


def test_read_texts_by_file_line_and_paragraph(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT.encode())
    assert list(read_texts(path)) == [TEXT]
    assert list(read_texts(path, unit="line")) == ["One line.", "Another.", "A paragraph."]
    assert list(read_texts(path, unit="paragraph")) == ["One line.\nAnother.", "A paragraph."]
    with pytest.raises(ClearheadError, match="did you mean 'line'"):
        list(read_texts(path, unit="lines"))


def test_read_texts_of_a_folder_reads_txt_gz_and_jsonl_sorted_by_name(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "sub" / "c.jsonl").write_text('{"text": "c1"}\n\n{"text": "c2"}\n')
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a"))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert list(read_texts(tmp_path)) == ["a", "b", "c1", "c2"]


def test_read_lines_splits_at_newlines_only_and_skips_the_byte_order_mark(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\u2028still one\x0b\r\ntwo\n\nend".encode())
    assert list(read_lines(path)) == ["one\u2028still one\x0b", "two", "", "end"]
    assert read_text(path) == "one\u2028still one\x0b\r\ntwo\n\nend"


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("read", [lambda path: list(read_lines(path)), read_text])
def test_a_file_that_is_not_utf8_gives_an_error_with_byte_and_offset(tmp_path, suffix, read):
    content = "Grüße\nund ".encode() + b"\xfc" + b"ber\n"
    path = tmp_path / f"latin.txt{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(ClearheadError, match=rf"latin.txt{suffix} is not UTF-8 text: byte 0xfc at offset 12;"):
        read(path)


def test_broken_gzip_missing_files_and_empty_folders_are_rejected(tmp_path):
    complete = gzip.compress(TEXT.encode() * 100)
    (tmp_path / "cut.txt.gz").write_bytes(complete[:-20])
    (tmp_path / "none.txt.gz").write_bytes(b"plain text")
    with pytest.raises(ClearheadError, match="not a complete gzip file"):
        read_text(tmp_path / "cut.txt.gz")
    with pytest.raises(ClearheadError, match="cannot be read: Not a gzipped file"):
        read_text(tmp_path / "none.txt.gz")
    with pytest.raises(ClearheadError, match="does not exist"):
        list(read_texts(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ClearheadError, match=r"contains no \.txt or \.jsonl file"):
        list(read_texts(tmp_path / "empty"))


def test_read_texts_reads_a_pipe():
    """A shell passes one for `<(zcat …)`."""
    reader, writer = os.pipe()
    os.write(writer, b"a b\nc\n")
    os.close(writer)
    assert list(read_texts(f"/dev/fd/{reader}", "line")) == ["a b", "c"]
    os.close(reader)


def test_read_parallel_pairs_lines_and_rejects_unequal_or_empty_files(tmp_path):
    (tmp_path / "en").write_text("a dog\na cat\n")
    (tmp_path / "de.gz").write_bytes(gzip.compress(b"ein Hund\neine Katze\n"))
    assert read_parallel(tmp_path / "en", tmp_path / "de.gz") == [("a dog", "ein Hund"), ("a cat", "eine Katze")]
    (tmp_path / "fr").write_text("un chien\n")
    with pytest.raises(ClearheadError, match=r"en has 2 lines and .*fr has 1;"):
        read_parallel(tmp_path / "en", tmp_path / "fr")
    (tmp_path / "empty").write_text("")
    with pytest.raises(ClearheadError, match="empty is empty; it must contain at least one entry"):
        read_parallel(tmp_path / "empty", tmp_path / "empty")


def test_read_table_selects_two_columns(tmp_path):
    path = tmp_path / "table.tsv"
    path.write_text("1\thello\tHH AH\n2\tworld\tW ER\n")
    assert read_table(path, 1, 2) == [("hello", "HH AH"), ("world", "W ER")]
    with pytest.raises(ClearheadError, match=r"line 1 of .*table.tsv has 3 tab-separated columns, but columns 1 and 3"):
        read_table(path, 1, 3)
    path.write_bytes(b"\xef\xbb\xbfa\tb\r\n\r\n\tc\r\n")
    assert read_table(path) == [("a", "b"), ("", "c")]


def test_read_chats_returns_the_messages(tmp_path):
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
        ('{"body": "x"}', "line 1 of .* has no text under the key 'text'; its keys are: body"),
        (r'{"text": "cut \uD83D"}', "line 1 of .* has an unpaired surrogate"),
    ],
)
def test_invalid_json_lines_are_rejected_with_the_line_number(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(line)
    with pytest.raises(ClearheadError, match=message):
        list(read_texts(path))


def test_a_chat_message_without_content_is_rejected(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [{"role": "user"}]}\n')
    with pytest.raises(ClearheadError, match=r'line 1 of .* needs "messages"'):
        read_chats(path)


def test_upper_case_suffixes_and_surrogate_pairs_are_read(tmp_path):
    (tmp_path / "A.JSONL").write_text('{"text": "\\ud83d\\ude42"}\n')
    (tmp_path / "B.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "b"}\n'))
    assert list(read_texts(tmp_path)) == ["\N{SLIGHTLY SMILING FACE}", "b"]


@pytest.mark.parametrize("unit", ["file", "line", "paragraph"])
def test_a_gzip_file_that_expands_too_much_is_rejected_with_bounded_memory(tmp_path, monkeypatch, unit):
    """Zeros shrink to a thousandth, so that 20 MB could expand to 20 GB."""
    monkeypatch.setattr(sources, "FREE_EXPANSION_BYTES", 1 << 20)
    path = tmp_path / "bomb.txt.gz"
    with gzip.open(path, "wb", compresslevel=9) as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
    tracemalloc.start()
    with pytest.raises(ClearheadError, match=r"expands to more than .* over 32 times its size; .* decompress it"):
        list(read_texts(path, unit))
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def test_a_gzip_file_of_ordinary_text_is_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "FREE_EXPANSION_BYTES", 0)
    lines = [f"line {number * 7919 % 10007}" for number in range(20_000)]
    with gzip.open(tmp_path / "text.txt.gz", "wt") as file:
        file.write("\n".join(lines))
    assert list(read_texts(tmp_path / "text.txt.gz", "line")) == lines
    assert list(read_texts(tmp_path / "text.txt.gz")) == ["\n".join(lines)]


def test_a_device_is_rejected():
    with pytest.raises(ClearheadError, match=r"/dev/zero is a device and may never end"):
        list(read_texts("/dev/zero"))
