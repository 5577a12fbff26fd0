"""An interactive shell in a pseudo-terminal: type commands, answer their questions, and read what they print.

    with Terminal(folder, environment) as terminal:
        outcome = terminal.run("clearhead chat smollm2", [Answer("> $", "Hello\\r"), Answer("> $", "\\x04")])

The shell prints a mark with the exit code before each prompt, so that the end of a command is certain. An answer is
typed when the output since the last answer matches its pattern and nothing more is printed for a moment.
"""

import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path
from types import TracebackType

ROWS = 30
COLUMNS = 100
_MARK = re.compile(rb"\x1b\]777;exit (\d+)\x07")
_PROMPT_COMMAND = r"printf '\033]777;exit %d\007' $?"
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[=>]")
_QUIET_SECONDS = 1.0  # a command that prints nothing for this long waits for an answer
_STOP_SECONDS = 15.0  # for a command to end after Ctrl-C


@dataclass(frozen=True)
class Answer:
    """What to type into an interactive command when its output matches a pattern."""

    pattern: str
    text: str


@dataclass(frozen=True)
class Outcome:
    """What a command printed, how it ended, how long it took, and how much of that it computed."""

    code: int
    seconds: float
    cpu_seconds: float  # of all its processes and threads; on a busy machine, elapsed time is much longer
    output: str


class TerminalClosedError(Exception):
    """The shell has ended."""


class Terminal:
    """Bash in a pseudo-terminal of 100 x 30 characters."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.process, self.descriptor = pty.fork()
        if self.process == 0:
            os.chdir(folder)
            variables = {**environment, "PROMPT_COMMAND": _PROMPT_COMMAND, "TERM": "xterm-256color"}
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], variables)
        ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._read_until_prompt(time.monotonic() + 30, [])

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.descriptor)  # the shell and its jobs get SIGHUP
        try:
            os.kill(self.process, signal.SIGKILL)
        finally:
            os.waitpid(self.process, 0)

    def run(self, command: str, answers: Sequence[Answer] = (), timeout_seconds: float = 600) -> Outcome:
        """Type a command and wait for the next prompt. After the timeout, press Ctrl-C and report code 124."""
        started = time.monotonic()
        cpu_seconds = self._cpu_seconds()
        for line in command.splitlines():
            os.write(self.descriptor, line.encode() + b"\r")
        try:
            code, output = self._read_until_prompt(started + timeout_seconds, list(answers))
        except TimeoutError as error:
            code, output = 124, error.args[0] + self._stop_command()
        text = output.decode(errors="replace").replace("\r\n", "\n")
        return Outcome(code, time.monotonic() - started, self._cpu_seconds() - cpu_seconds, text)

    def _cpu_seconds(self) -> float:
        """Return the processor time of all commands that the shell has waited for."""
        fields = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")  # cutime, cstime

    def _stop_command(self) -> bytes:
        """Press Ctrl-C, kill the command if it does not end, and return what it prints until the next prompt."""
        os.write(self.descriptor, b"\x03")
        try:
            return self._read_until_prompt(time.monotonic() + _STOP_SECONDS, [])[1]
        except TimeoutError as error:
            os.killpg(os.tcgetpgrp(self.descriptor), signal.SIGKILL)
            rest = self._read_until_prompt(time.monotonic() + _STOP_SECONDS, [])[1]
            return bytes(error.args[0]) + rest + b"\n(Ctrl-C did not stop it)\n"

    def _read_until_prompt(self, deadline: float, answers: list[Answer]) -> tuple[int, bytes]:
        """Return the exit code and the output before the next prompt; type the answers while waiting."""
        output = b""
        answered = 0  # bytes of output before the last answer
        while True:
            if time.monotonic() > deadline:
                raise TimeoutError(output)
            ready, _, _ = select.select([self.descriptor], [], [], _QUIET_SECONDS)
            if ready:
                try:
                    output += os.read(self.descriptor, 65536)
                except OSError:  # Linux reports the end of the shell like this
                    raise TerminalClosedError(output) from None
                if marks := _MARK.findall(output):
                    return int(marks[-1]), _MARK.sub(b"", output)
            elif answers and re.search(answers[0].pattern, visible_text(output[answered:].decode(errors="replace"))):
                answered = len(output)
                os.write(self.descriptor, answers.pop(0).text.encode())


def visible_text(output: str) -> str:
    """Return what a terminal shows of an output: no escape sequences, and of a line that is rewritten the last text."""
    lines = _ESCAPE.sub("", output).replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)
