"""Print generated text: whole words and no control characters on a terminal, unchanged text elsewhere.

printer = TextPrinter(sys.stdout); printer.write("Hello "); printer.write("world"); printer.finish()

The text arrives in pieces of any length. The last word is held back until it is complete, so that it can move to the
next line as a whole.
"""

import math
import os
from collections.abc import Callable
from typing import IO

from rich.cells import get_character_cell_size

from clearhead.terminal import escape_controls, is_terminal

_TAB_COLUMNS = 8
_MIN_COLUMNS = 10  # in a narrower terminal, words are not kept whole
_JOINER, _EMOJI_STYLE = "\u200d", "\ufe0f"
_SKIN_TONES = range(0x1F3FB, 0x1F400)
_FLAG_LETTERS = range(0x1F1E6, 0x1F200)
_CLOSING = frozenset(
    "、。，．・：；？！）］｝〉》」』】〕〗〙〟’”…‥ー々ぁぃぅぇぉっゃゅょァィゥェォッャュョ"
)  # never first in a line
_HANGUL = range(0xAC00, 0xD7A4)  # wide characters, but with spaces between words
_UNSPACED = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF))  # Thai and Lao, Burmese, Khmer


class TextPrinter:
    """Prints text to a stream as it arrives."""

    def __init__(self, stream: IO[str]):
        self.stream = stream
        self._wrap = WordWrap(lambda: _columns(stream)) if is_terminal(stream) else None
        self._held = ""  # a carriage return that may be the start of a line break

    @property
    def is_terminal(self) -> bool:
        """Whether words are wrapped and control characters escaped."""
        return self._wrap is not None

    def write(self, text: str, style: str = "") -> None:
        """Print a piece of text. style: an escape sequence for the terminal, used for this piece alone."""
        if self._wrap is None:
            self._print(text)
            return
        text = self._held + text
        self._held = "\r" if text.endswith("\r") else ""
        text = text.removesuffix("\r").replace("\r\n", "\n")
        if style:
            shown = self._wrap.push(escape_controls(text)) + self._wrap.flush()
            self._print(f"{style}{shown}\x1b[0m")
        else:
            self._print(self._wrap.push(escape_controls(text)))

    def finish(self) -> None:
        """Print what is held back, and end the line."""
        if self._wrap is not None:
            self._print(self._wrap.push(escape_controls(self._held)) + self._wrap.flush())
            self._wrap, self._held = WordWrap(lambda: _columns(self.stream)), ""
        self._print("\n")

    def _print(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


def _columns(stream: IO[str]) -> int:
    """Return the present width of a terminal, which changes when its window does."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80  # 0: the terminal does not know
    except (OSError, ValueError):
        return 80


class WordWrap:
    """Breaks a stream of text into lines between words. A word that is longer than a line is cut.

    columns: returns the width of the terminal; it is called for every word.
    """

    def __init__(self, columns: Callable[[], int]):
        self.columns = columns
        self._column = 0  # where the next character would be printed
        self._gap = ""  # spaces before the word
        self._word = ""  # held back until it is complete

    def push(self, text: str) -> str:
        """Return what can be printed after this piece of text."""
        return "".join(map(self._push, text))

    def flush(self) -> str:
        """Return the word that is held back."""
        word, gap, self._word, self._gap = self._word, self._gap, "", ""
        if not word:
            self._gap = gap
            return ""
        needed = _width(gap + word)
        if self._column + needed <= self._limit():
            self._column += needed
            return gap + word
        start = "\n" if self._column else ""  # the gap is left out at the end of a line
        self._column = _width(word)
        return start + word

    def _limit(self) -> float:
        """Return how many columns to use: all but the last, where some terminals begin a new line by themselves."""
        columns = self.columns()
        return columns - 1 if columns >= _MIN_COLUMNS else math.inf

    def _push(self, char: str) -> str:
        if char == "\n":
            printed = self.flush() + "\n"
            self._column, self._gap = 0, ""
            return printed
        if char in " \t":
            printed = self.flush()
            used = self._column + len(self._gap)
            self._gap += " " if char == " " else " " * (_TAB_COLUMNS - used % _TAB_COLUMNS)
            return printed
        printed = ""
        limit = self._limit()
        if self._word and (limit == math.inf or _can_break(self._word, char) or _width(self._word + char) > limit):
            printed = self.flush()
        self._word += char
        return printed


def _width(text: str) -> int:
    """Return the columns of a text, at most: a terminal may show joined emoji as one, or each of them."""
    return sum(1 if char == _EMOJI_STYLE else get_character_cell_size(char) for char in text)


def _can_break(word: str, char: str) -> bool:
    """Return whether a line may end between a word and the next character, without a space."""
    if get_character_cell_size(char) == 0 or char in _CLOSING or word[-1] == _JOINER or ord(char) in _SKIN_TONES:
        return False
    if ord(char) in _FLAG_LETTERS and sum(ord(each) in _FLAG_LETTERS for each in word) % 2:
        return False  # two letters make a flag
    return _is_breakable(char) or _is_breakable(word.rstrip(_EMOJI_STYLE)[-1:] or char)


def _is_breakable(char: str) -> bool:
    """Return whether a character is written without spaces around it, as in Chinese, Japanese and Thai."""
    code = ord(char)
    if any(first <= code <= last for first, last in _UNSPACED):
        return True
    return get_character_cell_size(char) == 2 and code not in _HANGUL
