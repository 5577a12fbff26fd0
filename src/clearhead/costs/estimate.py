"""Compute the cost of a workload: FLOPs, bytes, memory, and the minimum time on a device.

report = cost(preset("llama-3.1-8b"), phase="decode", context=8192, device="h200"); report.bound.seconds
"""

from dataclasses import replace

from clearhead.architecture import ModelConfig
from clearhead.costs.calibration import Device, can_predict, find_device, predict_seconds
from clearhead.costs.formulas import (
    Communication,
    OperationCost,
    Optimizer,
    Parallel,
    Phase,
    Workload,
    active_parameters,
    cache_bytes_per_token,
    default_context,
    default_source,
    estimate_communication,
    list_operations,
    operation_costs,
    parameters_by_part,
)
from clearhead.costs.report import Bound, ModelFlops, Report
from clearhead.costs.simulation import estimate_memory, largest_batch, largest_context
from clearhead.errors import ClearheadError

_MAX_TRAINING_TOKENS = 1e30
_MAX_TENSOR_BYTES = 1 << 62  # PyTorch keeps the size of a tensor in a signed 64-bit integer


def cost(
    config: ModelConfig,
    *,
    phase: Phase | None = None,
    batch: int = 1,
    context: int | None = None,
    source: int | None = None,
    dtype: str = "bfloat16",
    weights: str = "full",
    optimizer: Optimizer = "adamw",
    recompute: bool = False,
    training_tokens: float | None = None,
    device: str | None = None,
    gpus: int = 1,
    parallel: Parallel = "ddp",
) -> Report:
    """Compute parameters, FLOPs, bytes, memory and time of a model from its config. Nothing is loaded or run.

    config: The model. `clearhead.cost` takes a name, such as "llama-3.1-8b", or a ModelConfig, such as `model.config`.
    phase: "train", "prefill" or "decode". Default: "train" if `training_tokens` is given, else "prefill".
    batch: Number of sequences, over all GPUs.
    context: Tokens per sequence; in decode, the tokens in the cache after the step. Default: the model's context.
    source: Tokens per source sequence of an encoder-decoder. Default: `context`, or the length of audio it reads.
    dtype: Precision of weights and activations: "bfloat16", "float16", "float32" or "float64".
    weights: Format of the weights at inference: "full", which is that of `dtype`, or "int8", "int4", "q4_0", "q4_1" or
        "q8_0".
    optimizer: "adamw", which stores two values per parameter, or "sgd", which stores none.
    recompute: Store only the input of each block in training, and recompute its activations in the backward pass.
    training_tokens: Tokens of a whole training run, to report its total FLOPs; only in the phase "train".
    device: A GPU by name ("h200", "h100", "a100", "rtx-4090", "l40s"), or "cpu" or "cuda" for this machine, which
        `clearhead calibrate` must have measured. The report then has a `bound` on the time.
    gpus: Number of GPUs. With several, operations and memory are those of one GPU.
    parallel: What is split across GPUs: "ddp" splits the batch; "fsdp" also splits weights, gradients and optimizer
        states; "tp" splits heads and feed-forward columns.

    Raise ClearheadError if an argument is invalid or does not fit the model.
    """
    _check_arguments(config, phase, source, training_tokens)
    found_device = None if device is None else find_device(device)
    length = default_context(config) if context is None else context
    workload = Workload(
        config=config,
        phase=phase or ("prefill" if training_tokens is None else "train"),
        batch=batch,
        context=length,
        source=default_source(config, length) if source is None else source,
        dtype=dtype,
        weights=weights,
        optimizer=optimizer,
        recompute=recompute,
        device_type="cpu" if device == "cpu" else "cuda",
        gpus=gpus,
        parallel=parallel,
    )
    check_size(workload)
    return _make_report(workload, found_device, None if training_tokens is None else int(training_tokens))


def _check_arguments(
    config: ModelConfig, phase: Phase | None, source: int | None, training_tokens: float | None
) -> None:
    """Raise ClearheadError if the arguments of `cost` that a Workload does not have are invalid."""
    if not isinstance(config, ModelConfig):
        raise ClearheadError(f"config is {config!r}; it must be a ModelConfig: clearhead.preset(name), or model.config")
    if training_tokens is not None and phase not in (None, "train"):
        raise ClearheadError(f"training_tokens applies only to phase 'train'; leave it out for phase {phase!r}")
    if training_tokens is not None and not 1 <= training_tokens <= _MAX_TRAINING_TOKENS:
        raise ClearheadError(f"training_tokens is {training_tokens:g}; it must be from 1 to {_MAX_TRAINING_TOKENS:g}")
    if source is not None and not config.is_encoder_decoder:
        raise ClearheadError("source applies only to an encoder-decoder; leave it out for this model")


def check_size(workload: Workload) -> None:
    """Raise ClearheadError if logits, or the scores of one layer, would exceed what a tensor can address."""
    config, length = workload.config, max(workload.context, workload.source)
    num_heads = max(layer.attention.num_heads for layer in config.output_stack.layers)
    num_elements = workload.batch * length * max(config.vocab_size, num_heads * length)
    if num_elements * workload.bytes_per_activation > _MAX_TENSOR_BYTES:
        sizes = f"{workload.batch:,} sequences of {length:,} tokens"
        raise ClearheadError(f"{sizes} need a tensor that is too large to be addressed; lower batch or context")


def _make_report(workload: Workload, device: Device | None, training_tokens: int | None) -> Report:
    config, operations = workload.config, operation_costs(workload)
    communication = estimate_communication(workload)
    return Report(
        workload=workload,
        parameters=parameters_by_part(config),
        active_parameters=active_parameters(config),
        operations=operations,
        memory=estimate_memory(workload),
        cache_bytes_per_token=cache_bytes_per_token(workload.per_gpu.config, workload.bytes_per_activation),
        model_flops=model_flops(workload),
        training_tokens=training_tokens,
        training_flops=None if training_tokens is None else 6 * active_parameters(config) * training_tokens,
        communication=communication,
        bound=None if device is None else _compute_bound(workload, operations, device, communication),
    )


def model_flops(workload: Workload) -> ModelFlops:
    """Return the FLOPs of one training token, whatever the phase of the workload.

    The FLOPs of an encoder are divided among the tokens of the decoder.
    """
    operations = list_operations(replace(workload, phase="train", batch=1, gpus=1, weights="full"))
    num_weights = sum(operation.active_weights * operation.num_layers for operation in operations)
    attention = [operation for operation in operations if not operation.weights]
    all_pairs = sum(operation.flops * operation.num_layers for operation in attention) // workload.context
    allowed = sum(operation.allowed_flops * operation.num_layers for operation in attention) // workload.context
    return ModelFlops(num_weights, 6 * num_weights + 3 * all_pairs, 6 * num_weights + 3 * allowed)


def _compute_bound(
    workload: Workload, operations: list[OperationCost], device: Device, communication: Communication | None
) -> Bound:
    """Return the roofline bound of the operations on a device."""
    peak = device.peak(workload.dtype)
    compute = [operation.flops / peak for operation in operations]
    memory = [operation.num_bytes / device.bytes_per_second for operation in operations]
    operation_seconds = sum(map(max, compute, memory))
    communication_seconds = 0.0
    if communication is not None and device.link_bytes_per_second is not None:
        communication_seconds = communication.bytes_each_way / device.link_bytes_per_second
    if workload.parallel == "tp":  # the next operation waits for the sum of a branch
        seconds = operation_seconds + communication_seconds
    else:  # gradients and weights can be sent while others are computed
        seconds = max(operation_seconds, communication_seconds)
    predicted = None
    if device.calibration is not None and can_predict(workload, device.calibration):
        predicted = predict_seconds(workload, device.calibration)
    return Bound(
        device=device.name,
        memory_bytes=device.memory_bytes,
        source=device.source,
        seconds=seconds,
        communication_seconds=communication_seconds,
        tokens_per_second=workload.num_tokens / (predicted or seconds),
        balance=peak / device.bytes_per_second,
        limited_by=["compute" if flops > moved else "memory" for flops, moved in zip(compute, memory, strict=True)],
        predicted_seconds=predicted,
        largest_batch=largest_batch(workload, device.memory_bytes),
        largest_context=largest_context(workload, device.memory_bytes),
    )
