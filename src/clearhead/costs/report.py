"""What a workload costs, in one typed answer: work, traffic, memory, and the least time on a device.

report = cost(preset("llama-3.1-8b"), phase="decode", context=8192, device="h200"); report.bound.seconds
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from clearhead.architecture import ModelConfig
from clearhead.costs.calibration.devices import Device
from clearhead.costs.calibration.devices import device as find_device
from clearhead.costs.calibration.predict import is_predicted, predict_seconds
from clearhead.costs.formulas.communication import Communication, communicate
from clearhead.costs.formulas.memory import Footprint, cache_bytes_per_token, footprint, largest_batch, largest_context
from clearhead.costs.formulas.operations import operations
from clearhead.costs.formulas.parameters import active_parameters, parameters
from clearhead.costs.formulas.product import Operation
from clearhead.costs.formulas.workload import Optimizer, Parallel, Phase, Workload, longest_context
from clearhead.errors import ClearheadError

MOST_TOKENS = 1e30
MOST_BYTES = 1 << 62  # of one tensor, whose size is a number of 64 bits


@dataclass(frozen=True)
class Row:
    """One kind of operation, in all layers of a stack and on one GPU: a line of the book's tables F2 and F3."""

    stack: str
    name: str
    formula: str  # FLOPs of one layer's forward
    traffic: str  # numbers it reads and writes
    flops: int  # whole rectangles of queries and keys, as the kernel is handed them
    allowed_flops: int  # pairs that the mask allows
    num_bytes: int  # operands read and results written, each once

    @property
    def intensity(self) -> float:
        """FLOPs for each byte moved."""
        return self.flops / self.num_bytes


@dataclass(frozen=True)
class Utilization:
    """FLOPs of training for each token by the two conventions of MFU; P counts the weights a token is multiplied by.

    `palm`: 6·P + 12·L·N·H·T, attention counted whole (Chowdhery et al. 2022, appendix B); `causal`: its attention
    halved, as the mask allows half (Megatron). For each layer its own heads, and at most its window.
    """

    matrix_parameters: int
    palm_flops_per_token: int
    causal_flops_per_token: int


@dataclass(frozen=True)
class Bound:
    """The least time on a device: every operation at the peak rate of its slower side, nothing else."""

    device: str
    source: str
    seconds: float
    communication_seconds: float  # of those, or beside them where it can be hidden
    tokens_per_second: float
    balance: float  # FLOPs for each byte at which both sides take equally long
    sides: list[str]  # "compute" or "memory", row by row
    predicted_seconds: float | None  # with measured rates and what kernels cost; None: the device is not measured
    largest_batch: int
    largest_context: int


@dataclass(frozen=True)
class Report:
    workload: Workload
    parameters: dict[str, int]
    active_parameters: int
    rows: list[Row]
    memory: Footprint
    cache_bytes_per_token: int
    utilization: Utilization
    training_tokens: int | None
    training_flops: int | None  # 6 for each of those tokens and each active parameter (Kaplan et al. 2020)
    communication: Communication | None
    bound: Bound | None

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def flops(self) -> int:
        return sum(row.flops for row in self.rows)

    @property
    def allowed_flops(self) -> int:
        return sum(row.allowed_flops for row in self.rows)

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)

    @property
    def intensity(self) -> float:
        return self.flops / self.num_bytes


def cost(
    config: ModelConfig,
    *,
    phase: Phase | None = None,
    batch: int = 1,
    context: int | None = None,
    source: int | None = None,
    dtype: str = "bfloat16",
    quant: str | None = None,
    optimizer: Optimizer = "adamw",
    recompute: bool = False,
    tokens: float | None = None,
    device: str | None = None,
    gpus: int = 1,
    parallel: Parallel = "ddp",
) -> Report:
    """Without weights and without running anything. `tokens`: of a whole training; without them phase is "prefill"."""
    if not isinstance(config, ModelConfig):
        raise ClearheadError(f"config is {config!r}; it must be a ModelConfig: clearhead.preset(name), or model.config")
    if tokens is not None and phase not in (None, "train"):
        raise ClearheadError(f"tokens are those of a whole training; leave them out of phase {phase!r}")
    if tokens is not None and not 1 <= tokens <= MOST_TOKENS:
        raise ClearheadError(f"tokens is {tokens:g}; it must be from 1 to {MOST_TOKENS:g}")
    if source is not None and not config.is_encoder_decoder:
        raise ClearheadError("source is for an encoder-decoder; leave it out, this model reads its context alone")
    chosen = None if device is None else find_device(device)
    length = longest_context(config) if context is None else context
    workload = Workload(
        config=config,
        phase=phase or ("prefill" if tokens is None else "train"),
        batch=batch,
        context=length,
        source=length if source is None else source,
        dtype=dtype,
        quant=quant,
        optimizer=optimizer,
        recompute=recompute,
        device_type="cpu" if device == "cpu" else "cuda",
        gpus=gpus,
        parallel=parallel,
    )
    check_size(workload)
    rows = table_rows(operations(workload.of_one_gpu), workload)
    communication = communicate(workload)
    return Report(
        workload=workload,
        parameters=parameters(config),
        active_parameters=active_parameters(config),
        rows=rows,
        memory=footprint(workload),
        cache_bytes_per_token=cache_bytes_per_token(workload.of_one_gpu.config, workload.num_bytes),
        utilization=utilization(workload),
        training_tokens=None if tokens is None else int(tokens),
        training_flops=None if tokens is None else 6 * active_parameters(config) * int(tokens),
        communication=communication,
        bound=None if chosen is None else bound(workload, rows, chosen, communication),
    )


def check_size(workload: Workload) -> None:
    """Before anything is laid out: logits, and the scores of one layer, wherever they are written out."""
    config, length = workload.config, max(workload.context, workload.source)
    num_heads = max(layer.attention.num_heads for layer in config.output_stack.layers)
    if workload.batch * length * max(config.vocab_size, num_heads * length) * workload.num_bytes > MOST_BYTES:
        asked = f"{workload.batch:,} rows of {length:,} tokens"
        raise ClearheadError(f"{asked} are more than can be addressed; ask for fewer")


def table_rows(found: Iterable[Operation], workload: Workload) -> list[Row]:
    rows: dict[tuple[str, str, str, str], Row] = {}
    for operation in found:
        times = operation.times
        key = operation.stack, operation.name, operation.formula, operation.traffic
        before = rows.get(key, Row(*key, 0, 0, 0))
        rows[key] = Row(
            *key,
            before.flops + times * flops_of(operation, operation.flops, workload),
            before.allowed_flops + times * flops_of(operation, operation.needed_flops, workload),
            before.num_bytes + times * bytes_of(operation, workload),
        )
    return list(rows.values())


def flops_of(operation: Operation, forward: int, workload: Workload) -> int:
    if workload.phase != "train":
        return forward
    again = workload.recompute and operation.stack != "head"
    return forward * (1 + operation.backward + again)


def bytes_of(operation: Operation, workload: Workload) -> int:
    """A backward reads and writes all that the forward did twice over: once for each operand's gradient."""
    numbers = operation.inputs + operation.outputs + operation.scores
    forward = round(operation.weights * workload.weight_bytes) + numbers * workload.num_bytes
    if workload.phase != "train":
        return forward
    return forward * (4 if workload.recompute and operation.stack != "head" else 3)


def utilization(workload: Workload) -> Utilization:
    """Of one training token, whatever the workload is; an encoder's work is told for each token of the decoder."""
    training = operations(replace(workload, phase="train", batch=1, gpus=1, quant=None))
    matrices = sum(one.used_weights * one.times for one in training)
    looking = [one for one in training if not one.weights]
    whole = sum(one.flops * one.times for one in looking) // workload.context
    allowed = sum(one.needed_flops * one.times for one in looking) // workload.context
    return Utilization(matrices, 6 * matrices + 3 * whole, 6 * matrices + 3 * allowed)


def bound(workload: Workload, rows: list[Row], chosen: Device, communication: Communication | None) -> Bound:
    peak = chosen.peak(workload.dtype)
    computing = [row.flops / peak for row in rows]
    moving = [row.num_bytes / chosen.bytes_per_second for row in rows]
    working = sum(map(max, computing, moving))
    sending = 0.0
    if communication is not None and chosen.link_bytes_per_second is not None:
        sending = communication.bytes_each_way / chosen.link_bytes_per_second
    # Gradients and weights can travel while others are computed; a branch's sum is waited for.
    seconds = working + sending if workload.parallel == "tp" else max(working, sending)
    predicted = None
    if chosen.calibration is not None and is_predicted(workload, chosen.calibration):
        predicted = predict_seconds(workload, chosen.calibration)
    return Bound(
        device=chosen.name,
        source=chosen.source,
        seconds=seconds,
        communication_seconds=sending,
        tokens_per_second=workload.tokens / (predicted or seconds),
        balance=peak / chosen.bytes_per_second,
        sides=["compute" if work > move else "memory" for work, move in zip(computing, moving, strict=True)],
        predicted_seconds=predicted,
        largest_batch=largest_batch(workload, chosen.memory_bytes),
        largest_context=largest_context(workload, chosen.memory_bytes),
    )
