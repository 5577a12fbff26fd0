"""The resolved architecture for people to read: what each layer computes, and how many parameters each part has.

print_summary(summarize(preset("llama-3.1-8b")))
"""

from dataclasses import dataclass, fields, is_dataclass
from itertools import groupby
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from clearhead.config import kind_of
from clearhead.model.config import Experts, FeedForward, GroupedAttention, LatentAttention, Layer, ModelConfig, Stack
from clearhead.model.transformer import Transformer

# Part of the network a parameter belongs to, by the first of these that its name holds
PARTS = (
    ("router", "feed-forward"),
    ("cross_attention_residual", "norms"),
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
    """Neighbouring layers that are equal."""

    stack: str
    first: int
    last: int
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
    layers: list[LayerGroup]


def summarize(config: ModelConfig) -> Summary:
    with torch.device("meta"):
        network = Transformer(config)
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
    parts: dict[str, int] = {}
    for name, size in sizes.items():
        part = next(part for piece, part in PARTS if piece in name)
        parts[part] = parts.get(part, 0) + size
    assert sum(parts.values()) == sum(sizes.values())
    groups = [
        group
        for name, stack in (("encoder", config.encoder), ("decoder", config.decoder))
        if stack is not None
        for group in layer_groups(name, stack, sizes)
    ]
    kinds = {(True, True): "encoder-decoder", (True, False): "encoder", (False, True): "decoder"}
    return Summary(
        kind=kinds[config.encoder is not None, config.decoder is not None],
        width=config.width,
        context=config.context,
        vocab_size=config.vocab_size,
        parameters=sum(sizes.values()),
        active_parameters=sum(sizes.values()) - idle_parameters(config),
        parts=parts,
        layers=groups,
    )


def layer_groups(name: str, stack: Stack, sizes: dict[str, int]) -> list[LayerGroup]:
    groups = []
    for layer, numbered in groupby(enumerate(stack.layers), key=lambda pair: pair[1]):
        numbers = [number for number, _ in numbered]
        prefixes = tuple(f"{name}.layers.{number}." for number in numbers)
        cross = layer.cross_attention
        groups.append(
            LayerGroup(
                stack=name,
                first=numbers[0],
                last=numbers[-1],
                attention=describe_attention(layer.attention),
                cross_attention=None if cross is None else describe_attention(cross),
                feed_forward=describe_feed_forward(layer.feed_forward),
                norm=f"{layer.placement}, {describe(layer.norm)}",
                parameters=sum(size for parameter, size in sizes.items() if parameter.startswith(prefixes)),
            )
        )
    return groups


def idle_parameters(config: ModelConfig) -> int:
    """Parameters of the experts that one token does not visit."""

    def idle(layer: Layer) -> int:
        part = layer.feed_forward
        if not isinstance(part, Experts):
            return 0
        per_expert = (3 if part.expert.gated else 2) * part.expert.width * config.width
        return (part.num_experts - part.num_chosen) * per_expert

    return sum(idle(layer) for stack in (config.encoder, config.decoder) if stack for layer in stack.layers)


# --- words


def describe_attention(attention: GroupedAttention | LatentAttention) -> str:
    if isinstance(attention, LatentAttention):
        words = f"latent, {attention.num_heads} heads, rank {attention.latent_rank}"
    else:
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        sharing = "multi-head" if kv_heads == heads else "multi-query" if kv_heads == 1 else "grouped-query"
        words = f"{sharing}, {heads} heads of {attention.head_width}"
        if kv_heads not in (1, heads):
            words += f", {kv_heads} key-value heads"
    extras = [f"{name} {value:g}" for name in ("softcap", "clip") if (value := getattr(attention, name, None))]
    norm = getattr(attention, "head_norm", None)
    extras += [describe(norm)] if norm else []
    return "; ".join([words, describe(attention.position), describe(attention.reach), *extras])


def describe_feed_forward(part: FeedForward | Experts) -> str:
    if isinstance(part, FeedForward):
        return f"{'gated ' if part.gated else ''}{part.activation}, {part.width}"
    words = f"{part.num_chosen} of {part.num_experts} experts, each {describe_feed_forward(part.expert)}"
    return f"{words}; shared {describe_feed_forward(part.shared)}" if part.shared else words


def describe(part: Any) -> str:
    """Its name and numbers: `rope theta=500000, scaling=(llama3_scaling factor=8, …)`."""
    name = kind_of(type(part)).replace("_", " ")
    values = []
    for item in fields(part):
        value = getattr(part, item.name)
        if value is None or value == item.default:
            continue
        if is_dataclass(value):
            values.append(f"({describe(value)})")
        elif value is True:
            values.append(item.name)
        else:
            values.append(f"{item.name}={value:g}" if isinstance(value, float) else f"{item.name}={value}")
    return f"{name} {', '.join(values)}".strip()


# --- the table


def count(number: int) -> str:
    """1.24 B, 135 M."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number < 1000 * size else f"{number / size:,.0f} {unit}"
    return str(number)


def print_summary(summary: Summary, title: str, console: Console | None = None) -> None:
    console = console or Console()
    active = summary.active_parameters
    mixture = f" ({active:,} for each token)" if active != summary.parameters else ""
    console.print(f"[bold]{title}[/bold]: {summary.kind}, {summary.parameters:,} parameters{mixture}")
    console.print(f"width {summary.width:,}, vocabulary {summary.vocab_size:,}, context {summary.context:,}")
    layers = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("layers", "attention", "feed-forward", "norm", "parameters"):
        layers.add_column(column, justify="right" if column == "parameters" else "left")
    for group in summary.layers:
        span = f"{group.first}" if group.first == group.last else f"{group.first}-{group.last}"
        attention = group.attention + (f"\ncross: {group.cross_attention}" if group.cross_attention else "")
        row = (f"{group.stack} {span}", attention, group.feed_forward, group.norm, count(group.parameters))
        layers.add_row(*row)
    console.print(layers)
    parts = ", ".join(f"{part} {count(size)}" for part, size in summary.parts.items())
    console.print(f"by part: {parts}")
