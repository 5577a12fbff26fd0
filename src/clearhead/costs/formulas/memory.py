"""How much memory a run needs on one GPU, and the largest batch and context that fit.

    footprint(workload).peak

Weights, optimizer and cache are formulas; what training keeps for its backward, and the highest moment of a run, are
read off the network laid out on the meta device. What the driver itself takes, and gaps between tensors, are extra.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isqrt

from clearhead.architecture import GroupedAttention, LatentAttention, Layer, LearnedPositions, ModelConfig
from clearhead.cache import cached_shape
from clearhead.costs.formulas.attention import num_slots
from clearhead.costs.formulas.parameters import parameters
from clearhead.costs.formulas.workload import OPTIMIZER_NUMBERS, Workload
from clearhead.costs.simulation.layout import lay_out

TRACED_EXPERTS = 2  # what they leave is what 256 would
SOMETHING_HUGE = 1 << 24
MOST_LINES = 8  # tries; a peak without jumps takes fewer


@dataclass(frozen=True)
class Footprint:
    """Of one GPU, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # training: kept for the backward, logits included; running: the rest, spare room of the cache too
    logits: int
    cache: int  # keys and values held
    cross_cache: int  # keys and values of the source
    peak: int  # at the highest moment, which is less than the sum where parts do not meet


def footprint(workload: Workload) -> Footprint:
    training, one = workload.phase == "train", workload.of_one_gpu
    weights = weight_bytes(one) // (workload.gpus if workload.parallel == "fsdp" else 1)
    gradients = weights if training else 0
    optimizer = OPTIMIZER_NUMBERS[workload.optimizer] * weights if training else 0
    cache, cross = (0, 0) if training else cache_parts(one)
    if training:
        run = lay_out(one, TRACED_EXPERTS)
        saved = run.saved_bytes or 0
        highest = max(run.peak_bytes - (weight_bytes(one) - gradients), gradients, saved)
    else:
        highest = running_peak(one)
        saved = highest - cache - cross
    return Footprint(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=saved,
        logits=logit_bytes(one),
        cache=cache,
        cross_cache=cross,
        peak=weights + optimizer + highest,
    )


def running_peak(workload: Workload) -> int:
    """Without a backward a layer leaves nothing but its cache: one and two layers of each kind tell of all.

    The second stands first, so that the highest moment, wherever it is, finds what it left.
    """
    stack = workload.config.decoder
    if stack is None or workload.config.is_encoder_decoder:
        return lay_out(workload, TRACED_EXPERTS).peak_bytes

    def peak(layers: list[Layer]) -> int:
        config = replace(workload.config, decoder=replace(stack, layers=tuple(layers)))
        return lay_out(replace(workload, config=config), TRACED_EXPERTS).peak_bytes

    kinds = list(dict.fromkeys(stack.layers))
    once = peak(kinds)
    counts = {layer: stack.layers.count(layer) - 1 for layer in kinds}
    return once + sum(more * (peak([layer, *kinds]) - once) for layer, more in counts.items() if more)


def weight_bytes(workload: Workload) -> int:
    """All at the width of a matrix's: norms and biases, which are never quantised, are about a thousandth."""
    return round(sum(parameters(workload.config).values()) * workload.weight_bytes)


def logit_bytes(workload: Workload) -> int:
    return workload.logit_rows * workload.config.vocab_size * workload.num_bytes


# --- the cache


def cache_parts(workload: Workload) -> tuple[int, int]:
    """Keys and values of the tokens and of the source that a run holds."""
    if workload.config.decoder is None:
        return 0, 0
    return 0 if workload.reads_source else cache_bytes(workload), cross_cache_bytes(workload)


def cache_bytes(workload: Workload) -> int:
    """Equal to KeyValueCache.num_bytes after `context` tokens."""
    config, held = workload.config, 0
    assert config.decoder is not None
    for layer in dict.fromkeys(config.decoder.layers):
        times = config.decoder.layers.count(layer)
        slots = num_slots(layer, config, workload.context - 1, 1)
        held += times * kept_numbers(layer.attention) * min(workload.context, slots)
    return workload.batch * held * workload.num_bytes


def cache_bytes_per_token(config: ModelConfig, num_bytes: int) -> int:
    """While the text is shorter than every window."""
    return sum(kept_numbers(layer.attention) for layer in config.decoder.layers) * num_bytes if config.decoder else 0


def paged_cache_bytes(workload: Workload, page_size: int) -> int:
    """Of whole pages, in which every layer keeps every token; windows save nothing there."""
    assert workload.config.decoder is not None
    pages = -(-workload.context // page_size)
    numbers = sum(kept_numbers(layer.attention) for layer in workload.config.decoder.layers)
    return workload.batch * pages * page_size * numbers * workload.num_bytes


def kept_numbers(attention: GroupedAttention | LatentAttention) -> int:
    """Of one token: keys and values, or the latent and the rotary key."""
    num_heads, key_width, value_width = cached_shape(attention)
    return num_heads * (key_width + value_width)


def cross_cache_bytes(workload: Workload) -> int:
    """Equal to EncoderOutput.num_bytes once remembered."""
    layers = workload.config.decoder.layers if workload.config.decoder else ()
    numbers = sum(kept_numbers(layer.cross_attention) for layer in layers if layer.cross_attention is not None)
    return workload.batch * workload.source * numbers * workload.num_bytes


# --- what fits


def largest_batch(workload: Workload, memory_bytes: float) -> int:
    """0 where not even one row fits."""
    step = 1 if workload.parallel == "tp" else workload.gpus

    def peak(rows: int) -> int:
        return footprint(replace(workload, batch=rows * step)).peak

    return largest(peak, workload.batch // step, memory_bytes) * step


def largest_context(workload: Workload, memory_bytes: float) -> int:
    """Of the source, where that is what is read. At most what there are learned positions for; 0: no token fits."""
    config, of_source = workload.config, workload.reads_source
    stack = config.encoder if of_source and config.encoder is not None else config.output_stack
    positions = stack.embedding.positions
    limit = positions.num_positions if isinstance(positions, LearnedPositions) else None

    def peak(length: int) -> int:
        return footprint(replace(workload, source=length) if of_source else replace(workload, context=length)).peak

    return largest(peak, workload.source if of_source else workload.context, memory_bytes, limit)


def largest(peak: Callable[[int], int], start: int, memory_bytes: float, limit: int | None = None) -> int:
    """The largest size whose peak fits, to a hundredth: along a line through the last two, between what is known.

    Buffers that grow in jumps can lead such lines astray; then what is known is halved, by its logarithm.
    """
    low, high, at = 0, (limit or SOMETHING_HUGE) + 1, start
    before: tuple[int, int] | None = None
    tries = 0
    while high - low > max(1, low // 100):
        now, tries = (at, peak(at)), tries + 1
        low, high = (at, high) if now[1] <= memory_bytes else (low, at)
        guess = 2 * at
        if before is not None and before[1] != now[1]:
            guess = at + int((memory_bytes - now[1]) * (at - before[0]) / (now[1] - before[1]))
        margin = max(1, low // 200)  # step over the solution, so that it lies between two that were tried
        guess += margin if low == at else -margin
        if tries > MOST_LINES:
            guess = isqrt(max(low, 1) * high)
        before, at = now, min(max(guess, low + 1), high - 1)
    return low
