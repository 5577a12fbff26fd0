"""Peak memory of a workload on one GPU, and the largest batch and context that fit.

    estimate_memory(workload).peak

Weights, optimizer states and the KV cache are formulas. What training saves for its backward, and the peak of a run,
come from the simulation. The driver's own memory and fragmentation are not included.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isqrt

from clearhead.architecture import AudioEmbedding, Layer, LearnedPositions
from clearhead.costs.formulas import (
    OPTIMIZER_STATES,
    Workload,
    cache_bytes,
    cross_cache_bytes,
    logit_bytes,
    weight_bytes,
)
from clearhead.costs.simulation.meta_run import simulate

_SIMULATED_EXPERTS = 2  # enough for the memory that a mixture of any number of experts takes
MAX_SIZE = 1 << 24  # largest batch or context to try, where the model sets no limit
_MAX_SECANT_STEPS = 8  # a peak without jumps needs fewer


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one GPU in bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # training: saved for the backward, with the logits; inference: the rest, with unused cache slots
    logits: int
    cache: int  # keys and values of the tokens
    cross_cache: int  # keys and values of the source
    peak: int  # less than the sum if the parts are not live at the same time


def estimate_memory(workload: Workload) -> MemoryEstimate:
    """Return the memory that a workload needs on each GPU."""
    is_training, per_gpu = workload.phase == "train", workload.per_gpu
    weights = weight_bytes(per_gpu) // (workload.gpus if workload.parallel == "fsdp" else 1)
    gradients = weights if is_training else 0
    optimizer = OPTIMIZER_STATES[workload.optimizer] * weights if is_training else 0
    cache, cross_cache = (0, 0) if is_training else _cache_parts(per_gpu)
    if is_training:
        run = simulate(per_gpu, _SIMULATED_EXPERTS)
        activations = run.saved_bytes or 0
        temporary = max(run.peak_bytes - (weight_bytes(per_gpu) - gradients), gradients, activations)
    else:
        temporary = _inference_peak(per_gpu)
        activations = temporary - cache - cross_cache
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        logits=logit_bytes(per_gpu),
        cache=cache,
        cross_cache=cross_cache,
        peak=weights + optimizer + temporary,
    )


def _cache_parts(workload: Workload) -> tuple[int, int]:
    """Return the bytes of cached keys and values of the tokens and of the source."""
    if workload.config.decoder is None:
        return 0, 0
    return 0 if workload.encodes_source else cache_bytes(workload), cross_cache_bytes(workload)


def _inference_peak(workload: Workload) -> int:
    """Return the peak of everything but the weights, extrapolated from a few layers.

    At inference a layer leaves nothing behind but its cache. So one simulation with a layer of each kind, and one per
    kind with a second such layer, determine the peak of all layers. The second layer comes first, so that its cache is
    live at the peak, wherever the peak is.
    """
    stack = workload.config.decoder
    if stack is None or workload.config.is_encoder_decoder:
        return simulate(workload, _SIMULATED_EXPERTS).peak_bytes

    def peak(layers: list[Layer]) -> int:
        config = replace(workload.config, decoder=replace(stack, layers=tuple(layers)))
        return simulate(replace(workload, config=config), _SIMULATED_EXPERTS).peak_bytes

    kinds = list(dict.fromkeys(stack.layers))
    peak_of_kinds = peak(kinds)
    num_more = {layer: stack.layers.count(layer) - 1 for layer in kinds}
    return peak_of_kinds + sum(
        count * (peak([layer, *kinds]) - peak_of_kinds) for layer, count in num_more.items() if count
    )


# --- what fits


def largest_batch(workload: Workload, memory_bytes: float) -> int:
    """Return the largest batch whose peak fits in memory, or 0 if none does."""
    step = 1 if workload.parallel == "tp" else workload.gpus

    def peak(size: int) -> int:
        return estimate_memory(replace(workload, batch=size * step)).peak

    return largest_that_fits(peak, workload.batch // step, memory_bytes) * step


def largest_context(workload: Workload, memory_bytes: float) -> int:
    """Return the largest context whose peak fits in memory, or 0 if none does.

    For the prefill of an encoder-decoder this is the largest source. Learned positions limit it.
    """
    config, is_source = workload.config, workload.encodes_source
    stack = config.encoder if is_source and config.encoder is not None else config.output_stack
    if isinstance(stack.embedding, AudioEmbedding):  # it always reads the same length
        return workload.source if estimate_memory(workload).peak <= memory_bytes else 0
    positions = stack.embedding.positions
    limit = positions.num_positions if isinstance(positions, LearnedPositions) else None

    def peak(length: int) -> int:
        resized = replace(workload, source=length) if is_source else replace(workload, context=length)
        return estimate_memory(resized).peak

    return largest_that_fits(peak, workload.source if is_source else workload.context, memory_bytes, limit)


def largest_that_fits(peak: Callable[[int], int], start: int, memory_bytes: float, limit: int | None = None) -> int:
    """Return the largest size whose peak fits, to within 1 %, or 0: a secant search inside a bracket.

    Buffers that grow in jumps can mislead the secant, so after _MAX_SECANT_STEPS the bracket is bisected by logarithm.
    """
    low, high, size = 0, (limit or MAX_SIZE) + 1, start  # low fits, high does not
    previous: tuple[int, int] | None = None
    num_steps = 0
    while high - low > max(1, low // 100):
        current, num_steps = (size, peak(size)), num_steps + 1
        low, high = (size, high) if current[1] <= memory_bytes else (low, size)
        guess = 2 * size
        if previous is not None and previous[1] != current[1]:
            guess = size + int((memory_bytes - current[1]) * (size - previous[0]) / (current[1] - previous[1]))
        margin = max(1, low // 200)  # overshoot, so that the solution ends up between two sizes that were tried
        guess += margin if low == size else -margin
        if num_steps > _MAX_SECANT_STEPS:
            guess = isqrt(max(low, 1) * high)
        previous, size = current, min(max(guess, low + 1), high - 1)
    return low
