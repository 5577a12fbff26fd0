"""Start `clearhead serve` in several processes, with the environment that torchrun gives them.

with served(folder, size=2) as group: httpx2.post(f"{group.url}/v1/completions", ...)
"""

import os
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass

_SECONDS = 90


@dataclass
class Group:
    """The processes of one server in the order of their ranks, the files of their stderr, and its address."""

    processes: list[subprocess.Popen]
    logs: list
    url: str | None = None

    def messages(self, rank):
        """Return the lines that a process has printed, without those of torch."""
        lines = self.logs[rank].read_text().splitlines()
        return [line for line in lines if line.startswith(("note: ", "error: ")) or "Traceback" in line]

    def wait(self):
        """Return the exit codes once all processes have ended."""
        return [process.wait(_SECONDS) for process in self.processes]


@contextmanager
def started(folder, logs, *options, size=2, port=0):
    """Start the processes; those that are left at the end are killed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting_point = free.getsockname()[1]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting_point), "WORLD_SIZE": str(size)}
    command = [sys.executable, "-m", "clearhead", "serve", str(folder), "--port", str(port), "--device", "cpu"]
    files = [logs / f"rank{rank}.txt" for rank in range(size)]
    processes = []
    try:
        for rank, file in enumerate(files):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "CLEARHEAD_THREADS": "1"}
            with file.open("w") as log:
                arguments = [*command, *map(str, options)]
                processes.append(subprocess.Popen(arguments, stderr=log, env={**os.environ, **environment, **ranks}))
        yield Group(processes, files)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def served(folder, logs, *options, size=2):
    """Start the processes and wait until the first one serves."""
    with started(folder, logs, *options, size=size) as group:
        deadline = time.monotonic() + _SECONDS
        while group.url is None:
            found = re.search(r"http://[^:]+:\d+", group.logs[0].read_text())
            group.url = found and found[0]
            assert time.monotonic() < deadline, group.logs[0].read_text()
            assert all(process.poll() is None for process in group.processes), group.logs[0].read_text()
            time.sleep(0.05)
        yield group
