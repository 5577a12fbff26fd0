"""Generated text on a terminal: whole words, no control characters; in a pipe, the text itself."""

import io
import re
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from clearhead.cli.word_wrap import TextPrinter, WordWrap

WORDS = st.text(st.sampled_from("abcdefg -.,日本語テスト。한국어👍👩\u200d🚀é\u0301ไทย\t\n"), max_size=120)


def wrapped(text, columns=20):
    wrap = WordWrap(lambda: columns)
    return wrap.push(text) + wrap.flush()


def lines_of(text, columns=20):
    return wrapped(text, columns).split("\n")


def test_words_are_not_cut():
    assert lines_of("The quick brown fox jumps over it") == ["The quick brown fox", "jumps over it"]


def test_a_line_may_be_full_but_not_longer():
    assert lines_of("123456789 123456789 x") == ["123456789 123456789", "x"]
    assert lines_of("123456789 1234567890 x") == ["123456789", "1234567890 x"]


def test_a_word_longer_than_a_line_is_cut():
    assert lines_of("a " + "x" * 45 + " b") == ["a", "x" * 19, "x" * 19, "x" * 7 + " b"]


def test_line_breaks_and_indentation_stay():
    assert lines_of("def f():\n    return 1\n\nend") == ["def f():", "    return 1", "", "end"]


def test_tabs_move_to_the_next_tab_stop():
    assert lines_of("a\tb\n\tc", 40) == ["a       b", "        c"]


def test_chinese_and_japanese_wrap_between_characters_but_not_before_a_full_stop():
    assert lines_of("日本語の文章を書きます。") == ["日本語の文章を書き", "ます。"]
    assert lines_of("日本語の文章を書き。") == ["日本語の文章を書", "き。"]


def test_korean_words_stay_whole():
    assert lines_of("안녕하세요 반갑습니다 네") == ["안녕하세요", "반갑습니다 네"]


def test_joined_emoji_are_not_torn():
    family = "👩\u200d👩\u200d👧"
    assert "".join(lines_of(f"{family}" * 9)).count(family) == 9
    assert all(line.count("\u200d") % 2 == 0 for line in lines_of(family * 9))


def test_flags_are_not_torn():
    flag = "\U0001f1eb\U0001f1f7"
    assert all(len(line) % 2 == 0 for line in lines_of(flag * 15, 21))


def test_very_narrow_terminals_get_the_text_unchanged():
    assert wrapped("some words in it", columns=5) == "some words in it"


@given(WORDS, st.integers(10, 60))
@example("ab\u200dc", 10)
def test_no_line_is_wider_than_the_terminal_and_no_text_is_lost(text, columns):
    output = wrapped(text, columns)
    assert all(cell_len(line) < columns for line in output.split("\n"))
    assert re.sub(r"\s", "", output) == re.sub(r"\s", "", text)


@given(WORDS, st.integers(10, 60))
def test_words_that_fit_stay_on_one_line(text, columns):
    """A word is what is between spaces, without characters that may end a line."""
    words = [word for word in re.findall(r"[a-g\-.,]+", text) if len(word) < columns]
    lines = wrapped(text, columns).split("\n")
    for word in words:
        assert any(word in line for line in lines)


@given(WORDS, st.integers(10, 60), st.lists(st.integers(0, 120)))
def test_the_pieces_do_not_matter(text, columns, cuts):
    wrap = WordWrap(lambda: columns)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert "".join(map(wrap.push, pieces)) + wrap.flush() == wrapped(text, columns)


def test_only_the_last_word_is_held_back():
    wrap = WordWrap(lambda: 80)
    assert [wrap.push(piece) for piece in ("Hel", "lo", " wor", "ld", ".\n")] == ["", "", "Hello", "", " world.\n"]


def test_a_long_text_takes_linear_time():
    assert len(wrapped("x" * 200_000, columns=5)) == 200_000
    assert len(wrapped("x" * 200_000, columns=80)) == 200_000 + 200_000 // 79


# --- printing


class FakeTerminal(io.StringIO):
    def isatty(self):
        return True


def printed(stream, *pieces):
    printer = TextPrinter(stream)
    for piece in pieces:
        printer.write(piece)
    printer.finish()
    return stream.getvalue()


ATTACK = "\x1b[2J\x1b]0;title\x07 \x9b1m \u202e \r \x08"


def test_a_pipe_gets_the_text_of_the_model():
    long = " and more words" * 20
    assert printed(io.StringIO(), ATTACK, long) == ATTACK + long + "\n"


def test_a_terminal_gets_no_control_characters():
    shown = printed(FakeTerminal(), *ATTACK)
    assert shown == "\\x1b[2J\\x1b]0;title\\x07 \\x9b1m \\u202e \\x0d \\x08\n"


@pytest.mark.parametrize("pieces", [("one\r\ntwo",), ("one\r", "\ntwo"), ("one", "\r", "\n", "two")])
def test_windows_line_breaks_are_line_breaks(pieces):
    assert printed(FakeTerminal(), *pieces) == "one\ntwo\n"


def test_a_carriage_return_at_the_end_is_shown():
    assert printed(FakeTerminal(), "one\r") == "one\\x0d\n"
