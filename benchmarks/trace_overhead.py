"""What a trace costs before anything is asked of it: time and peak memory beside those of the plain forward.

python benchmarks/trace_overhead.py smollm2-135m 4096

Each way runs in a process of its own. `forward` goes to the logits, `hidden` as far as a trace does: to the last hidden
states. Memory is the peak of the process, weights included, for one run over all tokens; time is that of the processor
for 512 of them, the median of nine runs after a first. While it is timed, the C library keeps freed memory: to take it
back from the system in each run costs either way 5 to 10 %, and differently from run to run.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

import clearhead
from clearhead.inspection.tracing import trace

TIMED_TOKENS, TIMED_RUNS = 512, 9
KEEP_FREED = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}  # bytes, of glibc


def way(name: str, preset: str, num_tokens: int) -> Callable[[], object]:
    model = clearhead.create(preset)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (1, num_tokens), generator=generator)
    ways: dict[str, Callable[[], object]] = {
        "forward": lambda: model.network(tokens),
        "hidden": lambda: model.network.hidden(tokens),
        "trace": lambda: trace(model, tokens[0].tolist()),
    }
    return ways[name]


@torch.no_grad()
def peak_bytes(name: str, preset: str, num_tokens: int) -> int:
    kept = way(name, preset, num_tokens)()
    assert kept is not None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@torch.no_grad()
def median_seconds(name: str, preset: str) -> float:
    run, taken = way(name, preset, TIMED_TOKENS), []
    for _ in range(TIMED_RUNS + 1):
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return statistics.median(taken[1:])


def in_own_process(preset: str, num_tokens: str, kind: str, name: str) -> float:
    command = [sys.executable, __file__, preset, num_tokens, kind, name]
    environment = os.environ | (KEEP_FREED if kind == "seconds" else {})
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


if __name__ == "__main__":
    preset, num_tokens, *of_child = sys.argv[1:]
    if of_child:
        kind, name = of_child
        print(peak_bytes(name, preset, int(num_tokens)) if kind == "bytes" else median_seconds(name, preset))
        sys.exit()
    found = {name: in_own_process(preset, num_tokens, "bytes", name) for name in ("forward", "hidden", "trace")}
    taken = {name: in_own_process(preset, num_tokens, "seconds", name) for name in ("hidden", "trace")}
    report = {
        "preset": preset,
        "num_tokens": int(num_tokens),
        "peak_bytes": found,
        "memory_over_forward": found["trace"] / found["forward"],
        "seconds": taken,
        "time_over_hidden": taken["trace"] / taken["hidden"],
    }
    print(json.dumps(report))
