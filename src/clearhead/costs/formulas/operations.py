"""All matrix products of a workload, from the config alone: their FLOPs and the bytes that they read and write.

    for cost in operation_costs(Workload(config=config, phase="decode", context=4096, source=4096)): ...

A product of (m, k) and (k, n) takes 2·m·n·k FLOPs (book F1). Norms, softmax and activations multiply no matrices and
are not counted, as in published counts. Attention has two counts: `flops` of all pairs of queries and keys that the
kernel receives, and `allowed_flops` of the pairs that the mask allows.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from clearhead.architecture import AudioEmbedding, Experts, FeedForward, Layer, Stack
from clearhead.costs.formulas.attention import attention_operations, cross_key_value_operation
from clearhead.costs.formulas.matrix_products import Operation, Size, linear_operation
from clearhead.costs.formulas.workload import Workload


@dataclass(frozen=True)
class OperationCost:
    """One kind of operation in all layers of a stack, on one GPU: a row of the book's tables F2 and F3."""

    stack: str
    name: str
    formula: str  # FLOPs of the forward in one layer
    traffic: str  # elements read and written
    flops: int  # all pairs of queries and keys that the kernel receives
    allowed_flops: int  # only pairs that the mask allows
    num_bytes: int  # operands read and results written, each once
    fused_score_bytes: int = 0  # scores that a fused kernel does not move; in brackets in `traffic`

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs per byte moved."""
        return self.flops / self.num_bytes


def operation_costs(workload: Workload) -> list[OperationCost]:
    """Return the costs on one GPU, one entry per kind of operation and stack, in the order of the network."""
    costs: dict[tuple[str, str, str, str], OperationCost] = {}
    for operation in list_operations(workload.per_gpu):
        num_forwards = operation.num_layers * _flops_factor(operation, workload)
        key = operation.stack, operation.name, operation.formula, operation.traffic
        total = costs.get(key, OperationCost(*key, flops=0, allowed_flops=0, num_bytes=0))
        costs[key] = OperationCost(
            *key,
            flops=total.flops + num_forwards * operation.flops,
            allowed_flops=total.allowed_flops + num_forwards * operation.allowed_flops,
            num_bytes=total.num_bytes + operation.num_layers * _operation_bytes(operation, workload),
            fused_score_bytes=total.fused_score_bytes + operation.num_layers * _fused_score_bytes(operation, workload),
        )
    return list(costs.values())


def _flops_factor(operation: Operation, workload: Workload) -> int:
    """Return the FLOPs of forward, backward and recomputation as a multiple of those of the forward."""
    if workload.phase != "train":
        return 1
    return 1 + operation.backward_factor + _is_recomputed(operation, workload)


def _operation_bytes(operation: Operation, workload: Workload) -> int:
    """Return the bytes that one operation moves. A backward moves twice as many: once per operand's gradient."""
    num_elements = operation.inputs + operation.outputs + operation.scores
    forward = round(operation.weights * workload.bytes_per_weight) + num_elements * workload.bytes_per_activation
    if workload.phase != "train":
        return forward
    return forward * (3 + _is_recomputed(operation, workload))


def _fused_score_bytes(operation: Operation, workload: Workload) -> int:
    """Return the bytes of scores that one operation would also move without a fused kernel."""
    forward = operation.fused_scores * workload.bytes_per_activation
    return forward if workload.phase != "train" else forward * (3 + _is_recomputed(operation, workload))


def _is_recomputed(operation: Operation, workload: Workload) -> bool:
    return workload.recompute and operation.stack != "head"


def list_operations(workload: Workload) -> list[Operation]:
    """Return the operations of a workload on one GPU in the order of the network; equal layers form one entry."""
    config = workload.config
    operations: list[Operation] = []
    if config.encoder is not None and workload.phase != "decode":
        length = workload.source if config.is_encoder_decoder else workload.context
        if isinstance(config.encoder.embedding, AudioEmbedding):
            operations += labeled(_convolution_operations(config.encoder.embedding, workload), "encoder", 1)
        operations += _stack_operations("encoder", config.encoder, workload, length)
    if config.decoder is not None and workload.encodes_source:
        for layer, num_layers in distinct_layers(config.decoder):
            assert layer.cross_attention is not None
            operations += labeled([cross_key_value_operation(layer.cross_attention, workload)], "decoder", num_layers)
    elif config.decoder is not None:
        length = 1 if workload.phase == "decode" else workload.context
        operations += _stack_operations("decoder", config.decoder, workload, length)
    return operations + _head_operations(workload)


def _stack_operations(name: str, stack: Stack, workload: Workload, length: int) -> list[Operation]:
    return [
        operation
        for layer, num_layers in distinct_layers(stack)
        for operation in labeled(_layer_operations(layer, workload, length, name == "decoder"), name, num_layers)
    ]


def _convolution_operations(config: AudioEmbedding, workload: Workload) -> Iterator[Operation]:
    """Yield the two convolutions of width 3 as products of one row for each output and 3·inputs columns."""
    num_places, width = workload.batch * config.num_positions, Size("D", workload.config.width)
    frames, places = Size("2·B·S", 2 * num_places), Size("B·S", num_places)
    first = linear_operation("convolution", frames, Size("3·M", 3 * config.num_mel_bands), width)
    yield replace(first, backward_factor=1)  # the features need no gradient
    yield linear_operation("strided convolution", places, Size("3·D", 3 * width.number), width)


def distinct_layers(stack: Stack) -> list[tuple[Layer, int]]:
    """Return the different layers of a stack with the number of times that each occurs."""
    return [(layer, stack.layers.count(layer)) for layer in dict.fromkeys(stack.layers)]


def labeled(operations: Iterable[Operation], stack: str, num_layers: int) -> list[Operation]:
    """Return the operations with the stack that runs them and the number of its layers that do."""
    return [replace(operation, stack=stack, num_layers=num_layers) for operation in operations]


def _layer_operations(layer: Layer, workload: Workload, length: int, is_decoder: bool) -> Iterator[Operation]:
    yield from attention_operations(layer, workload, length, is_decoder)
    tokens, width = Size("B·T", workload.batch * length), Size("D", workload.config.width)
    match layer.feed_forward:
        case FeedForward():
            yield _feed_forward_operation("feed-forward", layer.feed_forward, tokens, width)
        case Experts():
            yield from _mixture_operations(layer.feed_forward, tokens, width)


def _feed_forward_operation(name: str, config: FeedForward, tokens: Size, width: Size) -> Operation:
    """Return the products of a feed-forward. Inner activations move twice: `up` and `gate` write, `down` reads them."""
    num_inputs = 2 if config.gated else 1  # matrices from the model's width to the inner width
    num_matrices = num_inputs + 1
    weights, inner = num_matrices * width.number * config.width, tokens.number * config.width
    flops = 2 * tokens.number * weights
    return Operation(
        name=name,
        formula=f"{2 * num_matrices}·{tokens.symbol}·D·F",
        traffic=f"{num_matrices}·D·F + {tokens.symbol}·({num_matrices}·D + {num_matrices}·F)",
        flops=flops,
        allowed_flops=flops,
        weights=weights,
        active_weights=weights,
        inputs=num_inputs * tokens.number * width.number + inner,
        outputs=num_inputs * inner + tokens.number * width.number,
    )


def _mixture_operations(config: Experts, tokens: Size, width: Size) -> Iterator[Operation]:
    """Yield the products of a mixture. Its weights are those of all experts that any token selects."""
    yield linear_operation("router", tokens, width, Size("E", config.num_experts))
    expert_tokens = Size(f"{tokens.symbol}·k", tokens.number * config.num_chosen)
    name = f"{config.num_chosen} of {config.num_experts} experts"
    experts = _feed_forward_operation(name, config.expert, expert_tokens, width)
    num_read = expected_experts(config.num_experts, config.num_chosen, tokens.number)
    yield replace(
        experts,
        weights=experts.weights * num_read,
        active_weights=experts.weights * config.num_chosen,
        traffic=f"{num_read}·{experts.traffic}",
    )
    if config.shared is not None:
        yield _feed_forward_operation("shared expert", config.shared, tokens, width)


def expected_experts(num_experts: int, num_chosen: int, num_tokens: int) -> int:
    """Return the expected number of different experts that tokens select: E·(1 - (1 - k/E)^tokens).

    This assumes uniform routing.
    """
    return round(num_experts * (1 - (1 - num_chosen / num_experts) ** num_tokens))


def _head_operations(workload: Workload) -> list[Operation]:
    config, num_positions = workload.config, workload.num_logit_positions
    if config.head is None or not num_positions:
        return []
    symbol = "B" if num_positions == workload.batch else "B·T"
    tokens, width = Size(symbol, num_positions), Size("D", config.width)
    operations = [linear_operation("head", tokens, width, Size("V", config.vocab_size))]
    if config.head.transform is not None:
        operations.insert(0, linear_operation("head transform", tokens, width, width))
    return [replace(operation, stack="head") for operation in operations]
