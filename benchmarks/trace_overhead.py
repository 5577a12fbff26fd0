"""Measure what recording a trace costs: its time and peak memory compared with a plain forward pass.

    python benchmarks/trace_overhead.py smollm2-135m 128 512 4096          # add `time` or `memory` for only one of them

`forward` computes the logits; `hidden` stops at the last hidden states, as a trace does. Time: `hidden` and `trace`
alternate in one process for 20 seconds, and the median of each is reported. Memory: the peak of a separate process,
including the weights.
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import clearhead

TIMED_SECONDS, MIN_RUNS = 20, 3
VARIANTS = ("forward", "hidden", "trace")


def make_variants(preset: str, num_tokens: int) -> dict[str, Callable[[], object]]:
    """Return the functions to measure, on random weights and tokens."""
    model = clearhead.create(preset)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (1, num_tokens), generator=generator)
    forward, hidden = (lambda: model.network(tokens)), (lambda: model.network.hidden_states(tokens))
    return dict(zip(VARIANTS, (forward, hidden, lambda: model.trace(tokens[0].tolist())), strict=True))


def median_seconds(preset: str, num_tokens: int) -> dict[str, float]:
    """Return the median time of `hidden` and `trace`, run alternately."""
    variants = make_variants(preset, num_tokens)
    seconds: dict[str, list[float]] = {"hidden": [], "trace": []}
    variants["hidden"]()
    start = time.perf_counter()
    while len(seconds["trace"]) < MIN_RUNS or time.perf_counter() - start < TIMED_SECONDS:
        for name in seconds if len(seconds["trace"]) % 2 else reversed(seconds):
            before = time.perf_counter()
            variants[name]()
            seconds[name].append(time.perf_counter() - before)
    return {name: statistics.median(times) for name, times in seconds.items()}


def peak_bytes(preset: str, num_tokens: int, name: str) -> int:
    """Return the peak memory of this process after running one variant.

    A child process inherits the peak of its parent, so the parent must stay small.
    """
    result = make_variants(preset, num_tokens)[name]()
    assert result is not None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_in_own_process(*arguments: str) -> Any:
    """Run this script with other arguments in a new process and return its JSON output."""
    command = [sys.executable, __file__, *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def report(preset: str, num_tokens: str, kinds: Sequence[str]) -> dict[str, object]:
    """Return the measurements for one number of tokens; kinds: `time`, `memory` or both."""
    measurements: dict[str, object] = {"preset": preset, "num_tokens": int(num_tokens)}
    if "time" in kinds:
        seconds = run_in_own_process(preset, num_tokens, "seconds")
        measurements |= {"seconds": seconds, "time_over_hidden": seconds["trace"] / seconds["hidden"]}
    if "memory" in kinds:
        peaks = {name: run_in_own_process(preset, num_tokens, name) for name in VARIANTS}
        measurements |= {"peak_bytes": peaks}
        measurements |= {f"memory_over_{name}": peaks["trace"] / peaks[name] for name in VARIANTS[:2]}
    return measurements


if __name__ == "__main__":
    preset, *rest = sys.argv[1:]
    counts, others = [word for word in rest if word.isdigit()], [word for word in rest if not word.isdigit()]
    with torch.no_grad():
        if others == ["seconds"]:
            print(json.dumps(median_seconds(preset, int(counts[0]))))
        elif others and others[0] in VARIANTS:
            print(peak_bytes(preset, int(counts[0]), others[0]))
        else:
            for number in counts:
                print(json.dumps(report(preset, number, others or ("time", "memory"))), flush=True)
