"""Print texts from files and models on a terminal, without the control characters that would change it.

    console = TerminalConsole(stderr=True); console.print(one_line(message), markup=False)

A tensor name, a chat template or the text of a model may contain anything: escape sequences that recolor the terminal,
move its cursor, set its title or make it answer, and characters that reverse the order of others. TerminalConsole
escapes them in everything that it prints: \\x1b is shown, not executed. tests/rules rejects any other console.
"""

import re
from collections.abc import Iterable
from typing import Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# C0 except tab and newline, delete, C1 (a terminal takes \x9b for the start of an escape sequence), and the overrides,
# embeddings and isolates of the direction of text.
_CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_MAX_MESSAGE_LENGTH = 2000  # characters


def escape_controls(text: str) -> str:
    """Return the text with control characters other than tab and newline as escapes such as `\\x1b` and `\\u202e`."""
    return _CONTROL_CHARACTERS.sub(_escape, text)


def escape_in_json(text: str) -> str:
    """Return JSON with control characters inside its strings as \\u escapes, which parsers read as the same data."""
    return _CONTROL_CHARACTERS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def one_line(text: str, max_length: int = _MAX_MESSAGE_LENGTH) -> str:
    """Return a message on one line: control characters and line breaks are escaped, and a very long text is cut.

    The start says what is wrong and the end what would work, so the middle is left out.
    """
    length, text = len(text), _cut(text, max_length, len(text))  # first, so that not all of a huge text is escaped
    return _cut(escape_controls(text).replace("\n", "\\n"), max_length, length)


def _cut(text: str, max_length: int, length: int) -> str:
    """Return at most `max_length` characters of a text; the note in the middle names its full length."""
    if len(text) <= max_length:
        return text
    note = f" … (cut; the whole text has {length:,} characters) … "
    num_kept = max(max_length - len(note), 0) // 2
    return text[:num_kept] + note + text[len(text) - num_kept :]


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class TerminalConsole(Console):
    """A rich console that escapes control characters in texts. Its own styles and cursor movements still work.

    Numbers are not highlighted and names such as :smile: stay, because the texts are data.
    """

    def __init__(self, *, highlight: bool = False, emoji: bool = False, **options: Any):
        super().__init__(highlight=highlight, emoji=emoji, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return the segments of an object, with control characters escaped in all but rich's own control segments."""
        for segment in super().render(renderable, options):
            if segment.control or not _CONTROL_CHARACTERS.search(segment.text):
                yield segment
            else:
                yield Segment(escape_controls(segment.text), segment.style)


def is_terminal(stream: object) -> bool:
    """Return whether a stream is a terminal; a closed or missing one is not."""
    try:
        return bool(cast(Any, stream).isatty())
    except (AttributeError, ValueError):
        return False
