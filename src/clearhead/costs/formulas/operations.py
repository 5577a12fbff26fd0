"""Every matrix product of a run, from the config alone: its FLOPs, and the numbers it reads and writes.

    for operation in operations(Workload(config=config, phase="decode", context=4096, source=4096)): ...

A product of (m, k) and (k, n) is 2·m·n·k FLOPs (book F1); norms, softmax and activations multiply no matrices and are
not counted, as in all published counts. Attention has two counts: `flops`, the whole rectangle of queries and keys
that the kernel is handed, and `allowed_flops`, the pairs that the mask allows.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from clearhead.architecture import Experts, FeedForward, Layer, Stack
from clearhead.costs.formulas.attention import attend_operations, cross_memory
from clearhead.costs.formulas.product import Operation, Size, linear
from clearhead.costs.formulas.workload import Workload


def operations(workload: Workload) -> list[Operation]:
    """In the order of the network; equal layers are one entry with `times`."""
    config = workload.config
    found: list[Operation] = []
    if config.encoder is not None and workload.phase != "decode":
        length = workload.source if config.is_encoder_decoder else workload.context
        found += stack_operations("encoder", config.encoder, workload, length)
    if config.decoder is not None and config.is_encoder_decoder and workload.phase == "prefill":
        for layer, times in counted(config.decoder):
            assert layer.cross_attention is not None
            found += repeated([cross_memory(layer.cross_attention, workload)], "decoder", times)
    elif config.decoder is not None:
        length = 1 if workload.phase == "decode" else workload.context
        found += stack_operations("decoder", config.decoder, workload, length)
    return found + head_operations(workload)


def stack_operations(name: str, stack: Stack, workload: Workload, length: int) -> list[Operation]:
    return [
        operation
        for layer, times in counted(stack)
        for operation in repeated(layer_operations(layer, workload, length, name == "decoder"), name, times)
    ]


def counted(stack: Stack) -> list[tuple[Layer, int]]:
    return [(layer, stack.layers.count(layer)) for layer in dict.fromkeys(stack.layers)]


def repeated(found: Iterable[Operation], stack: str, times: int) -> list[Operation]:
    return [replace(operation, stack=stack, times=times) for operation in found]


def layer_operations(layer: Layer, workload: Workload, length: int, decodes: bool) -> Iterator[Operation]:
    yield from attend_operations(layer, workload, length, decodes)
    tokens, width = Size("B·T", workload.batch * length), Size("D", workload.config.width)
    match layer.feed_forward:
        case FeedForward():
            yield feed_forward("feed-forward", layer.feed_forward, tokens, width)
        case Experts():
            yield from mixture(layer.feed_forward, tokens, width)


def feed_forward(name: str, config: FeedForward, tokens: Size, width: Size) -> Operation:
    """What `up` and `gate` wrote, `down` reads: the inner numbers move twice."""
    into = 2 if config.gated else 1
    weights, inner = (into + 1) * width.number * config.width, tokens.number * config.width
    return Operation(
        name=name,
        formula=f"{2 * (into + 1)}·{tokens.symbol}·D·F",
        traffic=f"{into + 1}·D·F + {tokens.symbol}·({into + 1}·D + {into + 1}·F)",
        flops=2 * tokens.number * weights,
        weights=weights,
        inputs=into * tokens.number * width.number + inner,
        outputs=into * inner + tokens.number * width.number,
    )


def mixture(config: Experts, tokens: Size, width: Size) -> Iterator[Operation]:
    """The chosen experts; read are the weights of all that some token visits, if all are liked alike."""
    yield linear("router", tokens, width, Size("E", config.num_experts))
    visits = Size(f"{tokens.symbol}·k", tokens.number * config.num_chosen)
    chosen = feed_forward(f"{config.num_chosen} of {config.num_experts} experts", config.expert, visits, width)
    read = num_visited(config.num_experts, config.num_chosen, tokens.number)
    yield replace(
        chosen,
        weights=chosen.weights * read,
        active_weights=chosen.weights * config.num_chosen,
        traffic=f"{read}·{chosen.traffic}",
    )
    if config.shared is not None:
        yield feed_forward("shared expert", config.shared, tokens, width)


def num_visited(num_experts: int, num_chosen: int, tokens: int) -> int:
    """Different experts that tokens visit, on average over even choices: E·(1 - (1 - k/E)^tokens)."""
    return round(num_experts * (1 - (1 - num_chosen / num_experts) ** tokens))


def head_operations(workload: Workload) -> list[Operation]:
    config, rows = workload.config, workload.logit_rows
    if config.head is None or not rows:
        return []
    tokens, width = Size("B" if rows == workload.batch else "B·T", rows), Size("D", config.width)
    found = [linear("head", tokens, width, Size("V", config.vocab_size))]
    if config.head.transform is not None:
        found.insert(0, linear("head transform", tokens, width, width))
    return [replace(operation, stack="head") for operation in found]
