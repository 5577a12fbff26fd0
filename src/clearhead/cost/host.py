"""What the host spends on an operation, Python included: a toy network of this package, where all time is the host's.

    seconds = host_seconds("cuda", "prefill"); print(seconds["each"])

On CUDA three kinds of kernel keep the host longer than others do: it asks a library which of many to launch. What they
take beyond a plain one is timed apart, since models differ in how many of them they have.
"""

from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from clearhead.cost.clock import Run, clock
from clearhead.cost.layout import lay_out
from clearhead.cost.running import build, prepare
from clearhead.cost.workload import Phase, Workload
from clearhead.model.branches import FeedForward
from clearhead.model.config import Embedding, GroupedAttention, Head, Layer, ModelConfig, Stack
from clearhead.model.parts import LayerNorm, Norm, RmsNorm, Rope

NUM_CALLS = 100
STEP_SECONDS = {"cpu": 0.3, "cuda": 1.0}  # of one pass
LENGTH = 8
NORM = RmsNorm(epsilon=1e-5)


def host_seconds(device: str, phase: Phase) -> dict[str, float]:
    """ "each": for each operation, views included; other kinds: for each such kernel beyond that."""
    on_cpu = device == "cpu"
    workload = Workload(
        config=toy(final_norm=LayerNorm(epsilon=1e-5)),  # a norm that no CUDA graph decodes
        phase=phase,
        context=LENGTH,
        source=LENGTH,
        dtype="float32" if on_cpu else "bfloat16",
        device_type="cpu" if on_cpu else "cuda",
    )
    longer = {} if on_cpu else longer_seconds(device, num_queries=1 if phase == "decode" else LENGTH)
    step = prepare(build(workload, device), workload)
    run = lay_out(workload)
    known = sum(longer.get(kernel.kind, 0.0) for kernel in run.kernels)
    return longer | {"each": max(0.0, clock(step, device, seconds=STEP_SECONDS[device]) - known) / run.num_dispatches}


@torch.no_grad()
def longer_seconds(device: str, num_queries: int) -> dict[str, float]:
    """One row takes other ways through the libraries than several."""
    x, weight = (torch.ones(rows, 64, device=device, dtype=torch.bfloat16) for rows in (num_queries, 64))
    query, key = (torch.ones(1, 2, length, 32, device=device, dtype=x.dtype) for length in (num_queries, LENGTH))
    plain = call_seconds(partial(torch.mul, x, 2.0), device)
    runs: dict[str, Run] = {
        "mm": partial(torch.mm, x, weight),
        "addmm": partial(torch.addmm, weight[0], x, weight),
        "attention": partial(scaled_dot_product_attention, query, key, key, is_causal=num_queries > 1),
    }
    return {kind: max(0.0, call_seconds(run, device) - plain) for kind, run in runs.items()}


def call_seconds(run: Run, device: str) -> float:
    def calls() -> None:
        for _ in range(NUM_CALLS):
            run()

    return clock(calls, device, seconds=0.1) / NUM_CALLS


def toy(final_norm: Norm = NORM) -> ModelConfig:
    attention = GroupedAttention(num_heads=2, num_kv_heads=1, head_width=32, position=Rope())
    inner = FeedForward(width=64, activation="silu", gated=True)
    layer = Layer(attention=attention, feed_forward=inner, norm=NORM)
    stack = Stack(embedding=Embedding(vocab_size=64), layers=(layer,) * 12, final_norm=final_norm)
    return ModelConfig(width=64, context=64, decoder=stack, head=Head())
