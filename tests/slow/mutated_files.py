"""Read mutated files of every kind that Clearhead reads, each in a process that may not crash, hang or grow.

    python -m tests.slow.mutated_files --files 100000 --jobs 2  # over all kinds
    python -m tests.slow.mutated_files --kind "gguf*" --each 2000  # so many of every kind whose name fits
    python -m tests.slow.mutated_files --kind gguf --number 17  # one file again, in this process, with its traceback

Each file must be read or refused with a ClearheadError: no crash, no other exception, at most 5 seconds of CPU time,
and a peak memory of at most twice the file and 64 MB above what the process had. What is read is also used: a network
computes logits, a tokenizer encodes and decodes, a batch is made. A changed training checkpoint must be refused or read
as before; tensors of a single safetensors file must keep their names and shapes. Other nonsense is not noticed.

The damage is deterministic: number n of a kind is the same file every time.
"""

import argparse
import ctypes
import json
import mmap
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from clearhead.errors import ClearheadError
from tests.slow.mutations import mutate
from tests.slow.readers import Kind, build_kinds
from tests.training.faulty_disk import fork_child

MAX_SECONDS = 5.0  # of CPU time; the machine may be busy
MAX_WAIT_SECONDS = 120.0  # without CPU time: a deadlock
MAX_RATIO, FREE_BYTES = 2, 64 << 20
GUARD_BYTES = 3 << 30  # of address space above that at the start, so that a bomb cannot take the whole machine


@dataclass(frozen=True)
class Finding:
    """A file that broke a promise."""

    kind: str
    number: int
    problem: str

    def __str__(self) -> str:
        return f"{self.kind} --number {self.number}: {self.problem}"


def mutated_content(kind: Kind, number: int) -> tuple[str, bytes]:
    """Return the name and the damaged content of the file that is replaced."""
    chance = random.Random(f"{kind.name} {number}")
    name = chance.choice(list(kind.files))
    return name, mutate((kind.folder / name).read_bytes(), kind.files[name], chance)


def read_mutated(kind: Kind, number: int) -> tuple[bool, int]:
    """Damage a file, read it and restore it; return whether it was accepted, and its size."""
    name, content = mutated_content(kind, number)
    path = kind.folder / name
    original = path.read_bytes()
    path.write_bytes(content)
    try:
        kind.read(kind.folder, name, content == original)
    except ClearheadError as error:
        _check_message(error)
        return False, len(content)
    finally:
        path.write_bytes(original)
    return True, len(content)


def _check_message(error: ClearheadError) -> None:
    """Raise AssertionError if a message cannot be printed or is endless."""
    message = str(error)
    message.encode()
    assert 0 < len(message) < 20_000, f"the message has {len(message)} characters"


class Memory:
    """The peak memory of this process since the last reset, as the kernel counts it."""

    def __init__(self) -> None:
        self.release = ctypes.CDLL(None).malloc_trim

    def reset(self) -> int:
        """Start a new measurement and return the current size."""
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")

    def peak(self) -> int:
        return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel does not report {field}")


class Board:
    """Memory that a reading process shares with its parent: the number it reads, and how many it has read."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 4096)

    def write(self, number: int, accepted: int) -> None:
        struct.pack_into("<qq", self.memory, 0, number, accepted)

    def read(self) -> tuple[int, int]:
        number, accepted = struct.unpack_from("<qq", self.memory, 0)
        return number, accepted


def read_range(kind: Kind, first: int, end: int, board: Board, log: Path) -> None:
    """Read the files from `first` to `end` in this process, and append the findings to a log."""
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust prints a panic before Python can catch it
    size = _status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (size + GUARD_BYTES, size + GUARD_BYTES))
    memory, accepted = Memory(), board.read()[1]
    for number in range(first, end):
        board.write(number, accepted)
        before, problem, num_bytes = memory.reset(), None, 0
        try:
            was_accepted, num_bytes = read_mutated(kind, number)
            accepted += was_accepted
        except BaseException as error:
            problem = f"{type(error).__name__}: {str(error)[:300]}"
        grown = memory.peak() - before
        if problem is None and grown > MAX_RATIO * num_bytes + FREE_BYTES:
            problem = f"the process grew by {grown >> 20} MB for a file of {num_bytes} bytes"
        if grown > FREE_BYTES // 2:
            memory.release(0)
        if problem is not None:
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps([kind.name, number, problem]) + "\n")
    board.write(end, accepted)


def cpu_seconds(process: int) -> float:
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Reading:
    """The mutated files of one kind, which child processes read one after the other: the next one if one dies."""

    def __init__(self, kind: Kind, num_files: int, log: Path) -> None:
        self.kind, self.num_files, self.log = kind, num_files, log
        self.pristine = {name: (kind.folder / name).read_bytes() for name in kind.files}
        self.board, self.lost, self.started = Board(), list[Finding](), time.monotonic()
        log.unlink(missing_ok=True)
        self._start(0)

    def _start(self, first: int) -> None:
        self.seen, self.since, self.used = -1, 0.0, 0.0  # the number that is being read, and when it was begun
        self.process = fork_child(lambda: read_range(self.kind, first, self.num_files, self.board, self.log))

    def is_finished(self) -> bool:
        """Return whether all files were read. A process that died or hangs is a finding; another one goes on."""
        problem = self._problem()
        if problem is None:
            return False
        if not problem:
            return True
        number, _ = self.board.read()
        self.lost.append(Finding(self.kind.name, number, problem))
        for name, content in self.pristine.items():
            (self.kind.folder / name).write_bytes(content)
        if number + 1 >= self.num_files:
            return True
        self._start(number + 1)
        return False

    def _problem(self) -> str | None:
        """Return None while the process reads, "" if it has read everything, and else why it ended."""
        ended, status = os.waitpid(self.process, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return f"the process ended with exit code {code}" if code else ""
        number, _ = self.board.read()
        if number != self.seen:
            self.seen, self.since, self.used = number, time.monotonic(), cpu_seconds(self.process)
        spent = cpu_seconds(self.process) - self.used
        if spent <= MAX_SECONDS and time.monotonic() - self.since <= MAX_WAIT_SECONDS:
            return None
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        return f"not finished after {spent:.1f} s of CPU time"

    @property
    def num_accepted(self) -> int:
        return self.board.read()[1]

    def findings(self) -> list[Finding]:
        """Return all findings, those of processes that died first."""
        lines = self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []
        return self.lost + [Finding(*json.loads(line)) for line in lines]

    def report(self) -> str:
        """Return a line about the result, and the first findings."""
        found = self.findings()
        seconds = time.monotonic() - self.started
        line = f"{self.kind.name:36} {self.num_files:6} files, {self.num_accepted:6} accepted, {len(found):4} findings"
        return "\n    ".join([f"{line}, {seconds:6.1f} s", *map(str, found[:5])])


def read_kind(kind: Kind, num_files: int, log: Path) -> tuple[int, list[Finding]]:
    """Read mutated files of one kind in child processes; return how many were accepted, and the findings."""
    reading = Reading(kind, num_files, log)
    while not reading.is_finished():
        time.sleep(0.05)
    return reading.num_accepted, reading.findings()


def read_all(
    num_files: int, folder: Path, pattern: str = "*", jobs: int = 1, each: int | None = None
) -> tuple[Counter[str], list[Finding]]:
    """Read `num_files` mutated files, or `each` of every kind whose name fits a pattern; `jobs` kinds at a time."""
    torch.set_num_threads(1)
    kinds = build_kinds(folder, pattern)
    counts, findings = Counter[str](kinds=len(kinds)), list[Finding]()
    ends = list(accumulate(kind.share for kind in kinds))
    borders = [0, *(round(num_files * end / ends[-1]) for end in ends)]
    shares = np.diff(borders).tolist() if each is None else [each] * len(kinds)
    waiting = list(zip(kinds, shares, strict=True))[::-1]
    running: list[Reading] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            kind, share = waiting.pop()
            running.append(Reading(kind, share, kind.folder.with_suffix(".findings.jsonl")))
        for reading in [reading for reading in running if reading.is_finished()]:
            running.remove(reading)
            found, accepted = reading.findings(), reading.num_accepted
            refused = reading.num_files - accepted - len(found)
            counts.update({"files": reading.num_files, "accepted": accepted, "refused": refused})
            findings += found
            print(reading.report(), file=sys.stderr, flush=True)
        time.sleep(0.02)
    return counts, findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000, help="number of mutated files")
    parser.add_argument("--kind", default="*", help="only kinds of files whose name fits this pattern")
    parser.add_argument("--each", type=int, help="number of mutated files of every kind, in place of --files")
    parser.add_argument("--jobs", type=int, default=1, help="number of kinds that are read at a time")
    parser.add_argument("--number", type=int, help="only this file of a kind, in this process")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        if options.number is not None:
            (kind,) = build_kinds(Path(temporary), options.kind)
            name, content = mutated_content(kind, options.number)
            print(f"{name}: {content[:2000]!r}", file=sys.stderr)
            try:
                print(read_mutated(kind, options.number))
            except BaseException:
                traceback.print_exc()
            return 0
        started = time.monotonic()
        counts, findings = read_all(options.files, Path(temporary), options.kind, options.jobs, options.each)
    print(json.dumps({**counts, "findings": len(findings), "seconds": round(time.monotonic() - started)}))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
