"""The resolved architecture for people to read: what each layer computes, and how many parameters each part has.

    print_summary(summarize(preset("llama-3.1-8b")), "Llama 3.1 8B")

Nothing is loaded: the network is laid out on the meta device and counted.
"""

from dataclasses import dataclass, fields, is_dataclass
from itertools import groupby
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clearhead.architecture import (
    Embedding,
    Experts,
    FeedForward,
    GroupedAttention,
    Head,
    LatentAttention,
    ModelConfig,
    NoPosition,
    Stack,
)
from clearhead.config import kind_of
from clearhead.model import MixtureLayer, Transformer

# Part of the network a parameter belongs to, by the first of these that its name holds
PARTS = (
    ("attention_residual", "norms"),
    ("feed_forward_residual", "norms"),
    ("cross_attention", "cross-attention"),
    ("attention", "attention"),
    ("feed_forward", "feed-forward"),
    ("final_norm", "norms"),
    ("embedding.norm", "norms"),
    ("embedding", "embedding"),
    ("relative_bias", "attention"),
    ("head", "head"),
    ("pooler", "pooler"),
)


@dataclass(frozen=True)
class LayerGroup:
    """The layers of a stack that are equal."""

    stack: str
    numbers: list[int]
    attention: str
    cross_attention: str | None
    feed_forward: str
    norm: str
    parameters: int  # of all the group's layers


@dataclass(frozen=True)
class Summary:
    kind: str
    width: int
    context: int
    vocab_size: int
    parameters: int
    active_parameters: int  # used for one token: of a mixture only the chosen experts
    parts: dict[str, int]
    embeddings: dict[str, str]  # of each stack
    layers: list[LayerGroup]
    final_norms: dict[str, str]  # of the stacks that have one
    head: str | None


def summarize(config: ModelConfig) -> Summary:
    with torch.device("meta"):
        network = Transformer(config)
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
    parts: dict[str, int] = {}
    for name, size in sizes.items():
        part = next(part for piece, part in PARTS if piece in name)
        parts[part] = parts.get(part, 0) + size
    assert sum(parts.values()) == sum(sizes.values())
    named = {"encoder": config.encoder, "decoder": config.decoder}
    stacks = {name: stack for name, stack in named.items() if stack is not None}
    embeddings = {name: describe_embedding(stack.embedding) for name, stack in stacks.items()}
    if config.share_embeddings:
        embeddings["decoder"] += "; the table of the encoder"
    return Summary(
        kind="-".join(stacks),
        width=config.width,
        context=config.context,
        vocab_size=config.vocab_size,
        parameters=sum(sizes.values()),
        active_parameters=sum(sizes.values()) - idle_parameters(network),
        parts=parts,
        embeddings=embeddings,
        layers=[group for name, stack in stacks.items() for group in layer_groups(name, stack, sizes)],
        final_norms={name: describe(stack.final_norm) for name, stack in stacks.items() if stack.final_norm},
        head=None if config.head is None else describe_head(config.head),
    )


def layer_groups(name: str, stack: Stack, sizes: dict[str, int]) -> list[LayerGroup]:
    groups = []
    for layer in dict.fromkeys(stack.layers):
        numbers = [number for number, other in enumerate(stack.layers) if other == layer]
        prefixes = tuple(f"{name}.layers.{number}." for number in numbers)
        cross = layer.cross_attention
        groups.append(
            LayerGroup(
                stack=name,
                numbers=numbers,
                attention=describe_attention(layer.attention),
                cross_attention=None if cross is None else describe_attention(cross),
                feed_forward=describe_feed_forward(layer.feed_forward),
                norm=f"{layer.placement}, {describe(layer.norm)}",
                parameters=sum(size for parameter, size in sizes.items() if parameter.startswith(prefixes)),
            )
        )
    return groups


def idle_parameters(network: Transformer) -> int:
    """Of the experts that one token does not visit."""
    mixtures = [part for part in network.modules() if isinstance(part, MixtureLayer)]
    return sum(
        stacked[mixture.config.num_chosen :].numel()
        for mixture in mixtures
        for stacked in mixture.parameters(recurse=False)
    )


# --- words


def describe_attention(attention: GroupedAttention | LatentAttention) -> str:
    if isinstance(attention, LatentAttention):
        words = f"latent of rank {attention.latent_rank}, epsilon {attention.latent_epsilon:g}"
        words += f", {attention.num_heads} heads of {attention.plain_width} + {attention.rotary_width}"
        words += f", values of {attention.value_width}"
        words += f", queries of rank {attention.query_rank}" if attention.query_rank else ""
    else:
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        sharing = "multi-head" if kv_heads == heads else "multi-query" if kv_heads == 1 else "grouped-query"
        words = f"{sharing}, {heads} heads of {attention.head_width}"
        words += f", {kv_heads} key-value heads" if kv_heads not in (1, heads) else ""
        words += f", values of {attention.value_width}" if attention.value_width else ""
    extras = [name.replace("_", " ") for name in ("input_bias", "output_bias") if getattr(attention, name, False)]
    numbers = {name: getattr(attention, name, None) for name in ("scale", "softcap", "clip")}
    extras += [f"{name} {value:g}" for name, value in numbers.items() if value is not None]
    parts = (getattr(attention, "head_norm", None), getattr(attention, "temperature", None))
    extras += [describe(part) for part in parts if part is not None]
    place = [] if isinstance(attention.position, NoPosition) else [describe(attention.position)]
    return "; ".join([words, *place, describe(attention.pattern), *extras])


def describe_embedding(embedding: Embedding) -> str:
    words = [f"{embedding.vocab_size:,} tokens"]
    if embedding.scale != 1.0:
        words.append(f"times {embedding.scale:g}")
    words += [describe(part) for part in (embedding.positions, embedding.norm) if part is not None]
    if embedding.num_token_types:
        words.append(f"{embedding.num_token_types} token types")
    return "; ".join(words)


def describe_feed_forward(part: FeedForward | Experts) -> str:
    if isinstance(part, FeedForward):
        return f"{'gated ' if part.gated else ''}{part.activation}, {part.width}{', bias' if part.bias else ''}"
    words = [f"{part.num_chosen} of {part.num_experts} experts, each {describe_feed_forward(part.expert)}"]
    if part.shared:
        words.append(f"shared {describe_feed_forward(part.shared)}")
    if part.divisor != 1.0:
        words.append(f"divided by {part.divisor:g}")
    return "; ".join([*words, describe(part.router)])


def describe_head(head: Head) -> str:
    words = ["the token table" if head.tied else "a table of its own"]
    if head.transform:
        words.append(describe(head.transform))
    if head.scale != 1.0:
        words.append(f"times {head.scale:g}")
    if head.bias:
        words.append("bias")
    if head.softcap:
        words.append(f"softcap {head.softcap:g}")
    return "; ".join(words)


def describe(part: Any) -> str:
    """Its name, numbers and what is set: `rope theta=500000, (llama3 scaling factor=8, …)`."""
    name = kind_of(type(part)).replace("_", " ")
    values = []
    for item in fields(part):
        value = getattr(part, item.name)
        if value is None or value is False or (isinstance(value, str) and value == item.default):
            continue
        if is_dataclass(value):
            values.append(f"({describe(value)})")
        elif value is True:
            values.append(item.name)
        else:
            values.append(f"{item.name}={value:g}" if isinstance(value, float) else f"{item.name}={value}")
    return f"{name} {', '.join(values)}".strip()


# --- the table


def spans(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ends)


def print_summary(summary: Summary, title: str, console: Console | None = None) -> None:
    console = console or Console()
    active = summary.active_parameters
    mixture = f" ({active:,} for each token)" if active != summary.parameters else ""
    console.print(f"[bold]{escape(title)}[/bold]: {summary.kind}, {summary.parameters:,} parameters{mixture}")
    console.print(f"width {summary.width:,}, vocabulary {summary.vocab_size:,}, context {summary.context:,}")
    rows = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for stack, words in summary.embeddings.items():
        rows.add_row(stack, "embedding", style="bold")
        rows.add_row("  tokens", words)
    for group in summary.layers:
        rows.add_row(group.stack, f"layers {spans(group.numbers)}: {group.parameters:,} parameters", style="bold")
        rows.add_row("  attention", group.attention)
        if group.cross_attention:
            rows.add_row("  cross-attention", group.cross_attention)
        rows.add_row("  feed-forward", group.feed_forward)
        rows.add_row("  norm", group.norm)
    for stack, words in summary.final_norms.items():
        rows.add_row(stack, "after the last layer", style="bold")
        rows.add_row("  norm", words)
    if summary.head:
        rows.add_row("head", summary.head, style="bold")
    console.print(rows)
    console.print("by part: " + "; ".join(f"{part} {size:,}" for part, size in summary.parts.items()))
