"""The resolved architecture of a model as text: what each layer computes, and how many parameters each part has.

    print_summary(summarize(preset("llama-3.1-8b")), "Llama 3.1 8B")

Everything comes from the config; no network is built and no weight is read.
"""

from dataclasses import dataclass, fields, is_dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clearhead.architecture import (
    AudioEmbedding,
    Embedding,
    Experts,
    FeedForward,
    GroupedAttention,
    Head,
    LatentAttention,
    Layer,
    ModelConfig,
    NoPosition,
    Stack,
)
from clearhead.config import kind_of
from clearhead.costs import active_parameters, layer_parameters, parameters_by_part
from clearhead.terminal import TerminalConsole


@dataclass(frozen=True)
class LayerGroup:
    """The equal layers of a stack."""

    stack: str
    numbers: list[int]
    attention: str
    cross_attention: str | None
    feed_forward: str
    norm: str
    shared: bool  # whether all layers have the same weights
    parameters: int  # of all layers of the group


@dataclass(frozen=True)
class Summary:
    """The architecture of a model in words and numbers."""

    kind: str
    width: int
    context: int
    vocab_size: int
    parameters: int
    active_parameters: int  # used by one token: of a mixture, only the selected experts
    parts: dict[str, int]  # number of parameters of each part
    embeddings: dict[str, str]  # by stack
    layers: list[LayerGroup]
    final_norms: dict[str, str]  # by stack, if it has one
    head: str | None


def summarize(config: ModelConfig) -> Summary:
    """Return the architecture of a model in words and numbers, from its config alone."""
    parts = parameters_by_part(config)
    named = {"encoder": config.encoder, "decoder": config.decoder}
    stacks = {name: stack for name, stack in named.items() if stack is not None}
    embeddings = {name: _describe_embedding(stack.embedding) for name, stack in stacks.items()}
    if config.share_embeddings:
        embeddings["decoder"] += "; shared with the encoder"
    return Summary(
        kind="-".join(stacks),
        width=config.width,
        context=config.context,
        vocab_size=config.vocab_size,
        parameters=sum(parts.values()),
        active_parameters=active_parameters(config),
        parts=parts,
        embeddings=embeddings,
        layers=[group for name, stack in stacks.items() for group in _group_layers(name, stack, config.width)],
        final_norms={name: describe(stack.final_norm) for name, stack in stacks.items() if stack.final_norm},
        head=_describe_heads(config),
    )


def _group_layers(name: str, stack: Stack, width: int) -> list[LayerGroup]:
    groups = []
    for layer in dict.fromkeys(stack.layers):
        numbers = [number for number, other in enumerate(stack.layers) if other == layer]
        cross_attention = layer.cross_attention
        groups.append(
            LayerGroup(
                stack=name,
                numbers=numbers,
                attention=_describe_attention(layer.attention),
                cross_attention=None if cross_attention is None else _describe_attention(cross_attention),
                feed_forward=_describe_feed_forward(layer.feed_forward),
                norm=_describe_norm(layer),
                shared=stack.shared_layers,
                parameters=(1 if stack.shared_layers else len(numbers)) * sum(layer_parameters(layer, width).values()),
            )
        )
    return groups


# --- words


def _describe_norm(layer: Layer) -> str:
    words = f"{layer.placement}, {describe(layer.norm)}" + "; none before attention" * (not layer.attention_norm)
    return words if layer.branch_scale == 1.0 else f"{words}; branches times {layer.branch_scale:g}"


def _describe_attention(attention: GroupedAttention | LatentAttention) -> str:
    if isinstance(attention, LatentAttention):
        heads = f"latent of rank {attention.latent_rank}, epsilon {attention.latent_epsilon:g}"
        heads += f", {attention.num_heads} heads of {attention.plain_width} + {attention.rotary_width}"
        heads += f", values of {attention.value_width}"
        heads += f", queries of rank {attention.query_rank}" if attention.query_rank else ""
    else:
        num_heads, num_kv_heads = attention.num_heads, attention.num_kv_heads
        kind = "multi-head" if num_kv_heads == num_heads else "multi-query" if num_kv_heads == 1 else "grouped-query"
        heads = f"{kind}, {num_heads} heads of {attention.head_width}"
        heads += f", {num_kv_heads} key-value heads" if num_kv_heads not in (1, num_heads) else ""
        heads += f", values of {attention.value_width}" if attention.value_width else ""
    position = [] if isinstance(attention.position, NoPosition) else [describe(attention.position)]
    biases = [name.replace("_", " ") for name in ("input_bias", "output_bias") if getattr(attention, name, False)]
    biases += ["no key bias"] * (not getattr(attention, "key_bias", True))
    numbers = {name: getattr(attention, name, None) for name in ("scale", "softcap", "clip")}
    settings = [f"{name} {value:g}" for name, value in numbers.items() if value is not None]
    settings += ["sinks"] if getattr(attention, "sinks", False) else []
    parts = [getattr(attention, name, None) for name in ("head_norm", "temperature")]
    details = [describe(part) for part in parts if part is not None]
    return "; ".join([heads, *position, describe(attention.pattern), *biases, *settings, *details])


def _describe_embedding(embedding: Embedding | AudioEmbedding) -> str:
    if isinstance(embedding, AudioEmbedding):
        return describe(embedding)
    words = [f"{embedding.vocab_size:,} tokens"] + [f"width {embedding.width}"] * (embedding.width is not None)
    if embedding.scale != 1.0:
        words.append(f"scale {embedding.scale:g}")
    words += [describe(part) for part in (embedding.positions, embedding.norm) if part is not None]
    if embedding.num_token_types:
        words.append(f"{embedding.num_token_types} token types")
    return "; ".join(words)


def _describe_feed_forward(config: FeedForward | Experts) -> str:
    if isinstance(config, FeedForward):
        gate, bias = "gated " if config.gated else "", ", bias" if config.bias else ""
        clamp = "" if config.clamp is None else f", {describe(config.clamp)}"
        return f"{gate}{config.activation}, width {config.width:,}{bias}{clamp}"
    words = [f"{config.num_chosen} of {config.num_experts} experts, each {_describe_feed_forward(config.expert)}"]
    if config.shared:
        words.append(f"shared {_describe_feed_forward(config.shared)}{', gated' if config.shared_gate else ''}")
    if config.divisor != 1.0:
        words.append(f"divided by {config.divisor:g}")
    return "; ".join([*words, describe(config.router)])


def _describe_heads(config: ModelConfig) -> str | None:
    heads = [] if config.head is None else [_describe_head(config.head)]
    heads += [] if config.classifier is None else [describe(config.classifier)]
    return "; ".join(heads) or None


def _describe_head(head: Head) -> str:
    words = ["tied to the token embedding" if head.tied else "not tied"]
    if head.transform:
        words.append(describe(head.transform))
    if head.scale != 1.0:
        words.append(f"scale {head.scale:g}")
    if head.bias:
        words.append("bias")
    if head.softcap:
        words.append(f"softcap {head.softcap:g}")
    return "; ".join(words)


def describe(part: Any) -> str:
    """Return the kind of a part of the config and its fields: `rope theta 500000, (llama3 scaling factor 8, …)`."""
    name = kind_of(type(part)).replace("_", " ")
    values = []
    for item in fields(part):
        value = getattr(part, item.name)
        if value is None or value is False or (isinstance(value, str) and value == item.default):
            continue
        if is_dataclass(value):
            values.append(f"({describe(value)})")
        elif value is True:
            values.append(item.name.replace("_", " "))
        elif isinstance(value, tuple):
            values.append(f"{len(value)} {item.name.replace('_', ' ')}")
        else:
            values.append(_describe_value(item.name, value))
    return f"{name} {', '.join(values)}".strip()


def _describe_value(name: str, value: float | int | str) -> str:
    """Return a field and its value in words: `epsilon 1e-05`, `1,024 positions` for num_positions."""
    shown = f"{value:g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
    words = name.replace("_", " ")
    return f"{shown} {words.removeprefix('num ')}" if name.startswith("num_") else f"{words} {shown}"


# --- the table


def format_ranges(numbers: list[int]) -> str:
    """Return sorted numbers as ranges: [0, 1, 2, 5] -> "0-2, 5"."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ranges = [[number for _, number in run] for _, run in runs]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ranges)


def print_summary(summary: Summary, title: str, console: Console | None = None) -> None:
    """Print a summary as a table."""
    console = console or TerminalConsole()
    num_active = summary.active_parameters
    active = f" ({num_active:,} active per token)" if num_active != summary.parameters else ""
    console.print(f"[bold]{escape(title)}[/bold]: {summary.kind}, {summary.parameters:,} parameters{active}")
    console.print(f"width {summary.width:,}, vocabulary {summary.vocab_size:,}, context {summary.context:,}")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for stack, words in summary.embeddings.items():
        table.add_row(stack, "embedding", style="bold")
        table.add_row("  tokens", words)
    for group in summary.layers:
        numbers = format_ranges(group.numbers)
        shared = ", shared by all" if group.shared else ""
        table.add_row(group.stack, f"layers {numbers}: {group.parameters:,} parameters{shared}", style="bold")
        table.add_row("  attention", group.attention)
        if group.cross_attention:
            table.add_row("  cross-attention", group.cross_attention)
        table.add_row("  feed-forward", group.feed_forward)
        table.add_row("  norm", group.norm)
    for stack, words in summary.final_norms.items():
        table.add_row(stack, "final norm", style="bold")
        table.add_row("  norm", words)
    if summary.head:
        table.add_row("head", summary.head, style="bold")
    console.print(table)
    console.print("by part: " + "; ".join(f"{part} {size:,}" for part, size in summary.parts.items()))
