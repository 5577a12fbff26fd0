"""Measurements that need a whole network, made with toy ones: host time per operation, and packed weights on a CPU.

    measure_host_seconds("cuda", "prefill")["each"]; measure_packed("int4")["layer_seconds"]

Host time includes Python; a toy network takes no other time. On CUDA, a launch takes longer than a view, and models
differ in how many they have of each, so two toy networks determine both. Three kinds of kernels occupy the host longer
still, since it asks a library which of many kernels to launch; they are timed separately.

Packed weights are decoded by our own CPU kernels. Four steps separate three rates: a network whose weights no cache
holds, one with hardly any weights, and one that is mostly cache at two lengths.
"""

import statistics
import time
from functools import partial
from typing import get_args

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
from clearhead.backends import Bits, accelerate, pack_network
from clearhead.costs.calibration.timing import Run, time_repeats, time_step
from clearhead.costs.formulas import Phase, Workload, cache_bytes, weight_bytes
from clearhead.costs.simulation import Step, build_network, decode_step, prepare_step, simulate
from clearhead.model import Transformer

# --- networks

NORM = RmsNorm(epsilon=1e-5)
UNUSUAL_HEAD_WIDTH = 24  # no CUDA graph decodes heads of this width


def toy_decoder(
    *,
    width: int,
    inner_width: int,
    num_heads: int,
    num_kv_heads: int,
    head_width: int,
    num_layers: int,
    context: int,
) -> ModelConfig:
    """Return a decoder in the style of LLaMA: rotary positions, RMS norms and a gated feed-forward."""
    attention = GroupedAttention(num_heads=num_heads, num_kv_heads=num_kv_heads, head_width=head_width, position=Rope())
    feed_forward = FeedForward(width=inner_width, activation="silu", gated=True)
    layer = Layer(attention=attention, feed_forward=feed_forward, norm=NORM)
    stack = Stack(embedding=Embedding(vocab_size=64), layers=(layer,) * num_layers, final_norm=NORM)
    return ModelConfig(width=width, context=context, decoder=stack, head=Head())


def toy_llama(head_width: int = 32) -> ModelConfig:
    """Return a toy that consists of many small kernels."""
    return toy_decoder(
        width=64,
        inner_width=64,
        num_heads=2,
        num_kv_heads=1,
        head_width=head_width,
        num_layers=12,
        context=64,
    )


def toy_gpt2() -> ModelConfig:
    """Return a toy in the style of GPT-2: a third of the kernels for half of the operations of `toy_llama`."""
    attention = GroupedAttention(
        num_heads=2, num_kv_heads=2, head_width=UNUSUAL_HEAD_WIDTH, input_bias=True, output_bias=True
    )
    feed_forward = FeedForward(width=64, activation="gelu_tanh", bias=True)
    layer = Layer(attention=attention, feed_forward=feed_forward, norm=LayerNorm(epsilon=1e-5))
    embedding = Embedding(vocab_size=64, positions=LearnedPositions(num_positions=64))
    stack = Stack(embedding=embedding, layers=(layer,) * 12, final_norm=layer.norm)
    return ModelConfig(width=64, context=64, decoder=stack, head=Head())


# --- host time per operation

_NUM_CALLS = 100
STEP_SECONDS = {"cpu": 0.3, "cuda": 1.0}  # of one pass
NUM_ROUNDS = 10
LENGTH = 8


def measure_host_seconds(device: str, phase: Phase) -> dict[str, float]:
    """Return the host's seconds per operation.

    "each": for each operation, including views; "launch": in addition for each kernel; other keys: in addition to both
    for these kinds of kernels. On a CPU there is only "each".
    """
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
        for config in ((toy_llama(),) if on_cpu else (toy_llama(UNUSUAL_HEAD_WIDTH), toy_gpt2()))
    ]
    steps = [prepare_step(build_network(workload, device), workload) for workload in workloads]
    seconds = _time_alternately(steps, device)
    runs = [simulate(workload) for workload in workloads]
    if on_cpu:
        return {"each": seconds[0] / runs[0].num_dispatches}
    by_kind = kernel_host_seconds(device, num_queries=1 if phase == "decode" else LENGTH)
    known = [sum(by_kind.get(kernel.kind, 0.0) for kernel in run.kernels) for run in runs]
    counts = [(run.num_dispatches, len(run.kernels)) for run in runs]
    return by_kind | solve_host_seconds(*((*count, seconds[i] - known[i]) for i, count in enumerate(counts)))


def _time_alternately(steps: list[Step], device: str) -> list[float]:
    """Time several steps in alternation, since the speed of a host changes within seconds."""
    step_seconds = STEP_SECONDS[device] / NUM_ROUNDS
    rounds = [[time_step(step, device, step_seconds) for step in steps] for _ in range(NUM_ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def solve_host_seconds(first: tuple[int, int, float], second: tuple[int, int, float]) -> dict[str, float]:
    """Solve seconds = operations · each + kernels · launch for two networks (operations, kernels, seconds).

    If there is no solution without negative times, launches count as free.
    """
    (operations, kernels, seconds), (other_operations, other_kernels, other_seconds) = first, second
    determinant = operations * other_kernels - other_operations * kernels
    if determinant:
        each = (seconds * other_kernels - other_seconds * kernels) / determinant
        launch = (operations * other_seconds - other_operations * seconds) / determinant
        if min(each, launch) >= 0.0:
            return {"each": each, "launch": launch}
    return {"each": (seconds + other_seconds) / (operations + other_operations), "launch": 0.0}


@torch.no_grad()
def kernel_host_seconds(device: str, num_queries: int) -> dict[str, float]:
    """Return the host's seconds for three kinds of kernels beyond an elementwise one.

    The libraries take different paths for one query and for several.
    """
    x, weight = (torch.ones(rows, 64, device=device, dtype=torch.bfloat16) for rows in (num_queries, 64))
    query, key = (torch.ones(1, 2, length, 32, device=device, dtype=x.dtype) for length in (num_queries, LENGTH))
    elementwise = _call_seconds(partial(torch.mul, x, 2.0), device)
    runs: dict[str, Run] = {
        "mm": partial(torch.mm, x, weight),
        "addmm": partial(torch.addmm, weight[0], x, weight),
        "attention": partial(scaled_dot_product_attention, query, key, key, is_causal=num_queries > 1),
    }
    return {kind: max(0.0, _call_seconds(run, device) - elementwise) for kind, run in runs.items()}


def _call_seconds(run: Run, device: str) -> float:
    def calls() -> None:
        for _ in range(_NUM_CALLS):
            run()

    return time_step(calls, device, seconds=0.1) / _NUM_CALLS


# --- packed weights

PACKED_FORMATS: tuple[Bits, ...] = get_args(Bits)
WIDE, _NUM_WIDE_LAYERS, _NUM_NARROW_LAYERS = (2048, 8192), 2, 12
_HEAD_WIDTH, _SHORT, _LONG = 64, 8, 2048
MEASURED_SECONDS = 1.5


def build_packed(workload: Workload) -> Transformer | None:
    """Build a network with packed weights in our CPU kernels, or return None if these cannot be compiled."""
    network = pack_network(build_network(workload, "cpu"), workload.weights)  # type: ignore[arg-type]  # a packed format
    return network if accelerate(network) else None


def measure_packed(weights: str) -> dict[str, float]:
    """Return the rates of decoding with packed weights, from the fastest steps, or {} without the kernels."""
    wide = _packed_workload(*WIDE, _NUM_WIDE_LAYERS, weights, _SHORT)
    narrow = _packed_workload(64, 64, _NUM_NARROW_LAYERS, weights, _SHORT)
    short, long = (_packed_workload(512, 64, 16, weights, context) for context in (_SHORT, _LONG))
    steps = []
    for workload in (wide, narrow, short, long):
        network = build_packed(workload)
        if network is None:
            return {}
        steps.append(decode_step(network, workload))
    fastest = [float("inf")] * len(steps)
    started = time.perf_counter()
    while time.perf_counter() - started < MEASURED_SECONDS:
        fastest = [min(before, time_repeats(step, "cpu", 1)) for before, step in zip(fastest, steps, strict=True)]
    wide_seconds, narrow_seconds, short_seconds, long_seconds = fastest
    layer_seconds = narrow_seconds / _NUM_NARROW_LAYERS
    return {
        "layer_seconds": layer_seconds,
        "weight_bytes_per_second": weight_bytes(wide) / (wide_seconds - _NUM_WIDE_LAYERS * layer_seconds),
        "cache_bytes_per_second": (cache_bytes(long) - cache_bytes(short)) / (long_seconds - short_seconds),
    }


def _packed_workload(width: int, inner_width: int, num_layers: int, weights: str, context: int) -> Workload:
    num_heads = width // _HEAD_WIDTH
    config = toy_decoder(
        width=width,
        inner_width=inner_width,
        num_heads=num_heads,
        num_kv_heads=max(1, num_heads // 4),
        head_width=_HEAD_WIDTH,
        num_layers=num_layers,
        context=_LONG,
    )
    return Workload(config=config, phase="decode", context=context, source=context, weights=weights, device_type="cpu")
