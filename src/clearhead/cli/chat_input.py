"""Read the messages of a chat: with an editor on a terminal, line by line from a pipe.

reader = open_reader({"/help": (), "/set": ("temperature",)}); message = reader.read()

On a terminal, prompt_toolkit edits the message: pasted lines stay one message (bracketed paste), Alt-Enter starts a new
line, the arrow keys move in the history and Tab completes commands.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from clearhead.terminal import is_terminal

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer

PATHS = ("PATHS",)  # in place of the words after a command: it takes the path of a file
_PROMPT = "> "
_PASTE_ON, _PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"


class Reader(Protocol):
    """Where the messages of a chat come from."""

    is_interactive: bool

    def read(self) -> str:
        """Return the next message. Raise EOFError at the end, and KeyboardInterrupt on Ctrl-C."""


def open_reader(words: Mapping[str, Sequence[str]]) -> Reader:
    """Return the reader for standard input. words: the commands to complete, with the words that may follow each."""
    if not is_terminal(sys.stdin) or not (is_terminal(sys.stdout) or is_terminal(sys.stderr)):
        return _LineReader()
    return _LineReader(_PROMPT) if _is_dumb() else _PromptReader(words)


def _is_dumb() -> bool:
    """Return whether the terminal cannot move its cursor, such as a shell inside an editor."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


class _LineReader:
    """Reads one message per line. prompt: printed before each; empty for a pipe."""

    def __init__(self, prompt: str = ""):
        self.prompt = prompt
        self.is_interactive = bool(prompt)

    def read(self) -> str:
        return input(self.prompt)


class _PromptReader:
    """Reads messages from a terminal. The history is not written to disk."""

    is_interactive = True

    def __init__(self, words: Mapping[str, Sequence[str]]):
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output
        from prompt_toolkit.output.vt100 import Vt100_Output
        from prompt_toolkit.shortcuts import CompleteStyle

        output = create_output(always_prefer_tty=True)
        if isinstance(output, Vt100_Output):
            output.enable_cpr = False  # do not ask for the place of the cursor: not every terminal answers
        self._session: PromptSession[str] = PromptSession(
            _PROMPT,
            multiline=True,
            prompt_continuation=" " * len(_PROMPT),
            key_bindings=_key_bindings(),
            completer=_completer(words),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            enable_suspend=True,
            output=output,
        )

    def read(self) -> str:
        return self._session.prompt()


def _key_bindings() -> Any:
    """Return the keys that differ from prompt_toolkit's: Enter sends a message, Alt-Enter starts a new line."""
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    bindings = KeyBindings()

    @bindings.add("enter", filter=has_focus(DEFAULT_BUFFER))
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter", filter=has_focus(DEFAULT_BUFFER))
    def start_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _completer(words: Mapping[str, Sequence[str]]) -> "Completer":
    """Return what completes commands and the words after them."""
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    paths = PathCompleter(expanduser=True)

    class CommandCompleter(Completer):
        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
            command, space, start = document.text_before_cursor.partition(" ")
            following = words.get(command, ())
            if space and following is PATHS:
                yield from paths.get_completions(Document(start), complete_event)
                return
            start, candidates = (start, following) if space else (command, tuple(words) if command else ())
            yield from (Completion(word, -len(start)) for word in candidates if word.startswith(start))

    return CommandCompleter()


@contextmanager
def keep_keys() -> Iterator[None]:
    """While an answer is printed, keep what is typed or pasted for the next message, instead of showing it at once.

    Ctrl-C still interrupts.
    """
    try:
        import termios
    except ImportError:  # Windows: its terminal shows keys only when they are read
        yield
        return
    if not is_terminal(sys.stdin):
        yield
        return
    terminal, stream = sys.stdin.fileno(), sys.stdout if is_terminal(sys.stdout) else sys.stderr
    marks = ("", "") if _is_dumb() else (_PASTE_ON, _PASTE_OFF)
    before = termios.tcgetattr(terminal)
    changed = termios.tcgetattr(terminal)
    changed[0] &= ~termios.ICRNL  # Enter stays distinct from a pasted line break
    changed[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(terminal, termios.TCSADRAIN, changed)
    stream.write(marks[0])
    stream.flush()
    try:
        yield
    finally:
        stream.write(marks[1])
        stream.flush()
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
