"""What a trace costs before anything is asked of it: time and peak memory beside those of the plain forward.

    python benchmarks/trace_overhead.py smollm2-135m 128 512 4096          # or one of both: … 4096 memory

`forward` goes to the logits, `hidden` as far as a trace does: to the last hidden states. Time: hidden and trace take
turns in one process for twenty seconds, the median of each. Memory: the peak of a process of its own, weights included.
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

TIMED_SECONDS, LEAST_TURNS = 20, 3
WAYS = ("forward", "hidden", "trace")


def ways(preset: str, num_tokens: int) -> dict[str, Callable[[], object]]:
    model = clearhead.create(preset)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (1, num_tokens), generator=generator)
    forward, hidden = (lambda: model.network(tokens)), (lambda: model.network.hidden_states(tokens))
    return dict(zip(WAYS, (forward, hidden, lambda: model.trace(tokens[0].tolist())), strict=True))


def median_seconds(preset: str, num_tokens: int) -> dict[str, float]:
    run = ways(preset, num_tokens)
    taken: dict[str, list[float]] = {"hidden": [], "trace": []}
    run["hidden"]()
    started = time.perf_counter()
    while len(taken["trace"]) < LEAST_TURNS or time.perf_counter() - started < TIMED_SECONDS:
        for name in taken if len(taken["trace"]) % 2 else reversed(taken):
            before = time.perf_counter()
            run[name]()
            taken[name].append(time.perf_counter() - before)
    return {name: statistics.median(times) for name, times in taken.items()}


def peak_bytes(preset: str, num_tokens: int, name: str) -> int:
    """A process that started from this one would count what this one has had, so this one stays small."""
    kept = ways(preset, num_tokens)[name]()
    assert kept is not None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_own_process(*arguments: str) -> Any:
    command = [sys.executable, __file__, *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def report(preset: str, num_tokens: str, kinds: Sequence[str]) -> dict[str, object]:
    found: dict[str, object] = {"preset": preset, "num_tokens": int(num_tokens)}
    if "time" in kinds:
        taken = in_own_process(preset, num_tokens, "seconds")
        found |= {"seconds": taken, "time_over_hidden": taken["trace"] / taken["hidden"]}
    if "memory" in kinds:
        peaks = {name: in_own_process(preset, num_tokens, name) for name in WAYS}
        found |= {"peak_bytes": peaks} | {f"memory_over_{name}": peaks["trace"] / peaks[name] for name in WAYS[:2]}
    return found


if __name__ == "__main__":
    preset, *rest = sys.argv[1:]
    counts, others = [one for one in rest if one.isdigit()], [one for one in rest if not one.isdigit()]
    with torch.no_grad():
        if others == ["seconds"]:
            print(json.dumps(median_seconds(preset, int(counts[0]))))
        elif others and others[0] in WAYS:
            print(peak_bytes(preset, int(counts[0]), others[0]))
        else:
            for number in counts:
                print(json.dumps(report(preset, number, others or ("time", "memory"))), flush=True)
