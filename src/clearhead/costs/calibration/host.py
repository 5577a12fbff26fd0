"""What the host spends on an operation, Python included: toy networks of this package, where all time is the host's.

    seconds = host_seconds("cuda", "prefill"); print(seconds["each"])

On CUDA a launch costs more than a view, and models differ in how many of each they have: two toys tell the two apart.
Three kinds of kernel keep the host longer still, since it asks a library which of many to launch: they are timed apart.
"""

import statistics
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from clearhead.architecture import (
    Embedding,
    FeedForward,
    GroupedAttention,
    Head,
    Layer,
    LayerNorm,
    LearnedPositions,
    ModelConfig,
    RmsNorm,
    Rope,
    Stack,
)
from clearhead.costs.calibration.clock import Run, clock
from clearhead.costs.formulas.workload import Phase, Workload
from clearhead.costs.simulation.layout import lay_out
from clearhead.costs.simulation.workload_steps import Step, build, prepare

NUM_CALLS = 100
STEP_SECONDS = {"cpu": 0.3, "cuda": 1.0}  # of one pass
NUM_TURNS = 10
LENGTH = 8
NORM = RmsNorm(epsilon=1e-5)
UNUSUAL = 24  # width of a head that no CUDA graph decodes


def host_seconds(device: str, phase: Phase) -> dict[str, float]:
    """ "each": for each operation, views included; "launch": for each kernel beyond that; some kinds: beyond both."""
    on_cpu = device == "cpu"
    workloads = [
        Workload(
            config=config,
            phase=phase,
            context=LENGTH,
            source=LENGTH,
            dtype="float32" if on_cpu else "bfloat16",
            device_type="cpu" if on_cpu else "cuda",
        )
        for config in ((toy(),) if on_cpu else (toy(UNUSUAL), plain_toy()))
    ]
    seconds = in_turns([prepare(build(workload, device), workload) for workload in workloads], device)
    runs = [lay_out(workload) for workload in workloads]
    if on_cpu:
        return {"each": seconds[0] / runs[0].num_dispatches}
    longer = longer_seconds(device, num_queries=1 if phase == "decode" else LENGTH)
    known = [sum(longer.get(kernel.kind, 0.0) for kernel in run.kernels) for run in runs]
    counts = [(run.num_dispatches, len(run.kernels)) for run in runs]
    return longer | told_apart(*((*count, seconds[i] - known[i]) for i, count in enumerate(counts)))


def in_turns(steps: list[Step], device: str) -> list[float]:
    """Of each step. A host's speed moves within seconds, and each is to have its part of every moment."""
    turns = [[clock(step, device, STEP_SECONDS[device] / NUM_TURNS) for step in steps] for _ in range(NUM_TURNS)]
    return [statistics.median(times) for times in zip(*turns, strict=True)]


def told_apart(first: tuple[int, int, float], second: tuple[int, int, float]) -> dict[str, float]:
    """seconds = operations · each + kernels · launch, of both; where that has no sensible answer, launches are free."""
    (operations, kernels, seconds), (other_operations, other_kernels, other_seconds) = first, second
    size = operations * other_kernels - other_operations * kernels
    if size:
        each = (seconds * other_kernels - other_seconds * kernels) / size
        launch = (operations * other_seconds - other_operations * seconds) / size
        if min(each, launch) >= 0.0:
            return {"each": each, "launch": launch}
    return {"each": (seconds + other_seconds) / (operations + other_operations), "launch": 0.0}


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


def toy(head_width: int = 32) -> ModelConfig:
    """Rotated heads, RMS norms and a gate, made of many small kernels."""
    attention = GroupedAttention(num_heads=2, num_kv_heads=1, head_width=head_width, position=Rope())
    layer = Layer(attention=attention, feed_forward=FeedForward(width=64, activation="silu", gated=True), norm=NORM)
    return of_layers(layer, Embedding(vocab_size=64))


def plain_toy() -> ModelConfig:
    """As GPT-2: a third of the kernels for half of the operations."""
    attention = GroupedAttention(num_heads=2, num_kv_heads=2, head_width=UNUSUAL, input_bias=True, output_bias=True)
    inner = FeedForward(width=64, activation="gelu_tanh", bias=True)
    layer = Layer(attention=attention, feed_forward=inner, norm=LayerNorm(epsilon=1e-5))
    return of_layers(layer, Embedding(vocab_size=64, positions=LearnedPositions(num_positions=64)))


def of_layers(layer: Layer, embedding: Embedding) -> ModelConfig:
    stack = Stack(embedding=embedding, layers=(layer,) * 12, final_norm=layer.norm)
    return ModelConfig(width=64, context=64, decoder=stack, head=Head())
