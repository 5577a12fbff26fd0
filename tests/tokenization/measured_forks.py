"""Processor seconds and peak memory of calls in processes of their own, which are forks of one small process.

    with measured_forks("def run(argument): return argument.upper()") as measure:
        seconds, peak_bytes, outcome = measure("hello")

The modules that the source imports are imported once, not for every call.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator

Measure = Callable[[str], tuple[float, int, str]]

# A process that was forked from a larger one reports its parent's peak as its own, except in /proc.
_SERVER = """
import json, os, resource, signal, sys, time
from pathlib import Path

def measured(argument):
    start_seconds = time.process_time()
    outcome = run(argument)
    seconds = time.process_time() - start_seconds
    status = Path("/proc/self/status")
    if status.exists():
        peak_bytes = int(status.read_text().split("VmHWM:")[1].split()[0]) << 10
    else:
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return [seconds, peak_bytes, outcome]

for line in sys.stdin:
    if os.fork() == 0:
        signal.alarm(60)
        print(json.dumps(measured(json.loads(line))), flush=True)
        os._exit(0)
    status = os.wait()[1]
    if status:
        print(json.dumps([float("inf"), 0, f"the process ended with status {status}"]), flush=True)
"""


@contextlib.contextmanager
def measured_forks(source: str) -> Iterator[Measure]:
    """Yield a function that calls `run` of a source with an argument, in a fork of its own.

    It returns the processor seconds, the peak memory in bytes and the result; infinite seconds if the fork crashes or
    takes longer than a minute.
    """
    command = [sys.executable, "-W", "ignore", "-c", source + _SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def measure(argument: str) -> tuple[float, int, str]:
            requests.write(f"{json.dumps(argument)}\n")
            requests.flush()
            seconds, peak_bytes, outcome = json.loads(answers.readline())
            return seconds, peak_bytes, outcome

        yield measure
        requests.close()
