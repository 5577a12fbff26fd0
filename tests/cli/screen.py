"""A program in a pseudo-terminal whose screen is emulated: type keys, resize the window, and read what a user sees.

with Screen([sys.executable, "-m", "clearhead", "chat", "smollm2"], columns=40) as screen: screen.wait_for("> ")
"""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
import unicodedata

import pyte
from wcwidth import wcwidth

WAIT_SECONDS = 60


class _Emulator(pyte.HistoryScreen):
    """Draw what follows a joiner of emoji too: pyte drops the rest of a run of text after a character without width."""

    def draw(self, data):
        super().draw("".join(character for character in data if wcwidth(character) or unicodedata.combining(character)))


class Screen:
    """A terminal of `columns` x `rows` characters that keeps the lines that scroll out of it."""

    def __init__(self, command, columns=80, rows=30, environment=None):
        self.output = b""
        self.emulator = _Emulator(columns, rows, history=10_000, ratio=0.5)
        self.stream = pyte.ByteStream(self.emulator)
        self.keyboard, terminal = pty.openpty()
        self._set_size(rows, columns)
        variables = {**os.environ, "TERM": "xterm-256color", **(environment or {})}
        variables.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, env=variables, preexec_fn=_take_terminal
        )
        os.close(terminal)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        os.close(self.keyboard)

    def _set_size(self, rows, columns):
        fcntl.ioctl(self.keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, rows, columns):
        """Change the size of the window, as a user does with the mouse."""
        self.emulator.resize(rows, columns)
        self._set_size(rows, columns)

    def type(self, keys):
        """Send keys; Enter is \\r."""
        os.write(self.keyboard, keys.encode())

    def paste(self, text):
        """Paste text as a terminal does: between marks if the program has asked for them, with \\r as line breaks."""
        text = text.replace("\n", "\r")
        self.type(f"\x1b[200~{text}\x1b[201~" if self.has_bracketed_paste else text)

    @property
    def has_bracketed_paste(self):
        """Whether the program has switched on bracketed paste."""
        return self.output.rfind(b"\x1b[?2004h") > self.output.rfind(b"\x1b[?2004l")

    @property
    def lines(self):
        """The lines of the screen and those above it, without trailing spaces."""
        above = [
            "".join(line[column].data for column in range(self.emulator.columns)) for line in self.emulator.history.top
        ]
        lines = [line.rstrip() for line in (*above, *self.emulator.display)]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def text(self):
        """All lines."""
        return "\n".join(self.lines)

    def read(self, seconds):
        """Show what the program prints within this time; return False if it has closed the terminal."""
        ready, _, _ = select.select([self.keyboard], [], [], seconds)
        if not ready:
            return True
        try:
            output = os.read(self.keyboard, 65536)
        except OSError:  # Linux reports the end like this
            return False
        self.output += output
        self.stream.feed(output)
        return bool(output)

    def wait_for(self, condition, seconds=WAIT_SECONDS):
        """Wait until the screen contains a text, or until a function of the screen returns true."""
        is_met = condition if callable(condition) else lambda screen: condition in screen.text
        end = time.monotonic() + seconds
        while not is_met(self):
            is_open = self.read(0.05)
            assert is_open or is_met(self), f"the program ended; the screen shows:\n{self.text[-3000:]}"
            assert time.monotonic() < end, f"waited for {condition!r}; the screen shows:\n{self.text[-3000:]}"

    def wait_for_prompt(self):
        """Wait until the last line is an empty prompt."""
        self.wait_for(lambda screen: bool(screen.lines) and screen.lines[-1] == ">")

    def interrupt(self):
        """Press Ctrl-C."""
        self.type("\x03")

    def wait_for_end(self, seconds=WAIT_SECONDS):
        """Return the exit code."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            self.read(0.05)
        return self.process.wait(timeout=1)


def _take_terminal():
    """Make the pseudo-terminal the controlling terminal of a new session, so that Ctrl-C is sent to the program."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # children of a shell in the background ignore it
