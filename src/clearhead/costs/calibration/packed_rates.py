"""How fast the processor's own kernels decode with packed weights: by bytes of weights, by layers, by bytes of cache.

    rates = measure_packed("int4"); print(rates["weight_bytes_per_second"], rates["layer_seconds"])

Three networks tell them apart: one whose weights no cache holds, one with hardly any, and one with little but a cache.
"""

import time
from typing import get_args

from clearhead.architecture import (
    Embedding,
    FeedForward,
    GroupedAttention,
    Head,
    Layer,
    ModelConfig,
    RmsNorm,
    Rope,
    Stack,
)
from clearhead.backends import Bits, accelerate, pack_network, unknown_in
from clearhead.costs.calibration.clock import several_seconds
from clearhead.costs.formulas.memory import cache_bytes, weight_bytes
from clearhead.costs.formulas.workload import Workload
from clearhead.costs.simulation.workload_steps import build, decoding
from clearhead.model import Transformer, fused_attention

FORMATS: tuple[Bits, ...] = get_args(Bits)
WIDE, NUM_WIDE, NUM_THIN = (2048, 8192), 2, 12
HEAD_WIDTH, SHORT, LONG = 64, 8, 2048
MEASURED_SECONDS = 1.5
NORM = RmsNorm(epsilon=1e-5)


def runs_packed(workload: Workload) -> bool:
    """Whether generation decodes this in the kernels of fast/step.cpp, one row at a time, as is measured here."""
    stack = workload.config.decoder
    alone = workload.batch == workload.gpus == 1 and not workload.config.is_encoder_decoder
    packed = workload.device_type == "cpu" and workload.quant in FORMATS
    return workload.phase == "decode" and packed and alone and stack is not None and unknown_in(stack) is None


def build_packed(workload: Workload) -> Transformer | None:
    """None where the kernels cannot be built."""
    network = pack_network(build(workload, "cpu"), workload.quant)  # type: ignore[arg-type]  # one of FORMATS
    return network if accelerate(network) else None


def packed_seconds(workload: Workload, rates: dict[str, float]) -> float:
    assert workload.config.decoder is not None
    return (
        weight_bytes(workload) / rates["weight_bytes_per_second"]
        + len(workload.config.decoder.layers) * rates["layer_seconds"]
        + cache_bytes(workload) / rates["cache_bytes_per_second"]
    )


def measure_packed(quant: str) -> dict[str, float]:
    """Of the fastest tokens; nothing where the kernels cannot be built."""
    wide, thin = token(model(*WIDE, NUM_WIDE), quant, SHORT), token(model(64, 64, NUM_THIN), quant, SHORT)
    short, long = (token(model(512, 64, num_layers=16), quant, length) for length in (SHORT, LONG))
    steps = []
    for workload in (wide, thin, short, long):
        network = build_packed(workload)
        if network is None:
            return {}
        steps.append(decoding(network, workload, fused_attention))
    fastest = [float("inf")] * len(steps)
    started = time.perf_counter()
    while time.perf_counter() - started < MEASURED_SECONDS:
        fastest = [min(before, several_seconds(step, "cpu", 1)) for before, step in zip(fastest, steps, strict=True)]
    of_wide, of_thin, of_short, of_long = fastest
    layer_seconds = of_thin / NUM_THIN
    return {
        "layer_seconds": layer_seconds,
        "weight_bytes_per_second": weight_bytes(wide) / (of_wide - NUM_WIDE * layer_seconds),
        "cache_bytes_per_second": (cache_bytes(long) - cache_bytes(short)) / (of_long - of_short),
    }


def token(config: ModelConfig, quant: str, context: int) -> Workload:
    return Workload(config=config, phase="decode", context=context, source=context, quant=quant, device_type="cpu")


def model(width: int, inner_width: int, num_layers: int) -> ModelConfig:
    heads = width // HEAD_WIDTH
    attention = GroupedAttention(
        num_heads=heads, num_kv_heads=max(1, heads // 4), head_width=HEAD_WIDTH, position=Rope()
    )
    inner = FeedForward(width=inner_width, activation="silu", gated=True)
    layer = Layer(attention=attention, feed_forward=inner, norm=NORM)
    stack = Stack(embedding=Embedding(vocab_size=64), layers=(layer,) * num_layers, final_norm=NORM)
    return ModelConfig(width=width, context=LONG, decoder=stack, head=Head())
