"""Time steps of the engine's network on a CPU: running sequences, prompts, and both mixed in one row.

    python benchmarks/packed_step.py smollm2 --weights bfloat16,int8,int4

Every step goes through the public classes: PackedCache, hidden_states and compute_logits of an accelerated network.
wall_ms is the median time of a step. cpu_ms is the least processor time of a step, divided by the number of threads: on
a machine that others use too, it is closer to the time that the step would take alone.
"""

import argparse
import json
import statistics
import time

import torch

import clearhead
from clearhead.cache import PackedCache, PackedLayout, PagePool, PageStorage, PageTable
from clearhead.model import Transformer

PAGE_SIZE = 32
STEPS = {  # new tokens of each sequence; all have a context of --context tokens before them
    "1 running": [1],
    "8 running": [1] * 8,
    "32 running": [1] * 32,
    "31 running, 1 prompt of 64": [1] * 31 + [64],
    "24 running, 8 prompts of 64": [1] * 24 + [64] * 8,
    "1 prompt of 512": [512],
}


def layout_of(tables: list[PageTable], counts: list[int]) -> PackedLayout:
    """Return the layout of the last `counts` tokens of each sequence."""
    starts = [table.num_tokens - count for table, count in zip(tables, counts, strict=True)]
    pairs = list(zip(tables, starts, strict=True))
    longest = max(len(table.pages) for table in tables)
    return PackedLayout(
        positions=torch.tensor([token for table, start in pairs for token in range(start, table.num_tokens)]),
        slots=torch.tensor([slot for table, start in pairs for slot in table.slots(start, table.num_tokens)]),
        sequence_starts=torch.tensor([0, *counts]).cumsum(0).int(),
        lengths=torch.tensor([table.num_tokens for table in tables]).int(),
        page_tables=torch.tensor([table.pages + [0] * (longest - len(table.pages)) for table in tables]).int(),
    )


def timed_steps(network: Transformer, counts: list[int], context: int, rounds: int) -> tuple[float, float]:
    """Return the median seconds of a step, and the least CPU seconds per thread. Prompts have no context."""
    assert network.config.decoder is not None
    pool = PagePool(sum((context + count) // PAGE_SIZE + 2 for count in counts), PAGE_SIZE)
    dtype = next(network.decoder.layers.parameters()).dtype  # type: ignore[union-attr]
    storage = PageStorage.for_stack(network.config.decoder, pool, dtype, torch.device("cpu"))
    tables = [pool.create_table([]) for _ in counts]
    for number, (table, count) in enumerate(zip(tables, counts, strict=True)):
        past = context if count == 1 else 0
        table.append([(number * 7919 + place * 31) % 1000 for place in range(past + count)])
    layout = layout_of(tables, counts)
    tokens = torch.randint(0, 1000, (1, sum(counts)))
    walls, processor = [], []
    with torch.inference_mode():
        for _ in range(rounds):
            wall, cpu = time.perf_counter(), time.process_time()
            hidden = network.hidden_states(tokens, cache=PackedCache(storage, layout))
            network.compute_logits(hidden[0, layout.sequence_starts[1:].long() - 1])
            walls.append(time.perf_counter() - wall)
            processor.append((time.process_time() - cpu) / torch.get_num_threads())
    return statistics.median(walls), min(processor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--weights", default="bfloat16,int8,int4")
    parser.add_argument("--context", type=int, default=96, help="tokens of a running sequence before its new one")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    for weights in arguments.weights.split(","):
        dtype, packed = (torch.bfloat16, "full") if weights == "bfloat16" else (None, weights)
        model = clearhead.load(arguments.model, weights=packed, dtype=dtype, fast=True)
        for name, counts in STEPS.items():
            wall, cpu = timed_steps(model.network, counts, arguments.context, arguments.rounds)
            row = {"weights": weights, "step": name, "tokens": sum(counts)}
            print(json.dumps(row | {"wall_ms": round(wall * 1e3, 2), "cpu_ms": round(cpu * 1e3, 2)}), flush=True)


if __name__ == "__main__":
    main()
