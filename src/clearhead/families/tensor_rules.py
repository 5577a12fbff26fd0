"""Convert tensors between the layout of a checkpoint and that of our network, in both directions.

    NAMES = {"h.{layer}.attn.c_attn.weight": Fused(("…query.weight", "…key.weight", "…value.weight"), transposed=True)}

A name table maps each foreign name, the name in the checkpoint, to one of our names, or to a rule. One table serves
loading (`split`) and saving (`join`). `{layer}`, `{expert}`, `{head}` and `{kv_head}` stand for numbers, and
`name[{expert}]` is one expert's slice of our stacked tensor. An entry applies if the network has the tensors it names.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clearhead.architecture import Experts, GroupedAttention, ModelConfig

if TYPE_CHECKING:  # listing presets must not import torch, which takes a second
    from torch import Size, Tensor

LAYER = "decoder.layers.{layer}"
QKV_WEIGHTS = tuple(f"{LAYER}.attention.{part}.weight" for part in ("query", "key", "value"))
QKV_BIASES = tuple(f"{LAYER}.attention.{part}.bias" for part in ("query", "key", "value"))
NUM_LAYERS_PLACEHOLDER = "{num_layers}"  # in Family.ignored_tensors: the number of layers in the config


@dataclass(frozen=True)
class TensorRule(ABC):
    """How one foreign tensor holds those of our tensors that `own_names` lists."""

    own_names: tuple[str, ...]
    transposed = False  # whether the rows of our tensors are columns of the foreign one; some rules have this field

    @abstractmethod
    def split(self, foreign: "Tensor", shapes: "list[Size]", config: ModelConfig) -> "list[Tensor]":
        """Return our tensors; `shapes` are the shapes that the network has for them."""

    @abstractmethod
    def join(self, parts: "list[Tensor]", config: ModelConfig) -> "Tensor":
        """Return the foreign tensor that holds `parts`; the inverse of `split`."""


@dataclass(frozen=True)
class Copy(TensorRule):
    """The foreign tensor is one of ours, possibly stored as (in, out).

    If the foreign name depends on the network (T5 calls the up projection `wi`, but `wi_1` beside a gate), `only_with`
    and `only_without` name one of our tensors that the network must or must not have. `only_placements` are the norm
    placements of the layer for which the entry applies (Falcon).
    """

    transposed: bool = False
    only_with: str | None = None
    only_without: str | None = None
    only_placements: tuple[str, ...] = ()
    only_reads: tuple[str, ...] = ()  # what the classifier reads, for an entry of its tensors (ELECTRA)

    def split(self, foreign: "Tensor", shapes: "list[Size]", config: ModelConfig) -> "list[Tensor]":
        return [foreign.transpose(-2, -1) if self.transposed else foreign]

    def join(self, parts: "list[Tensor]", config: ModelConfig) -> "Tensor":
        return parts[0].transpose(-2, -1) if self.transposed else parts[0]


@dataclass(frozen=True)
class Fused(TensorRule):
    """The foreign tensor is several of ours, concatenated along the output dimension."""

    transposed: bool = False

    def split(self, foreign: "Tensor", shapes: "list[Size]", config: ModelConfig) -> "list[Tensor]":
        rows = foreign.transpose(-2, -1) if self.transposed else foreign
        axis = max(rows.ndim - 2, 0)
        return list(rows.split([shape[axis] for shape in shapes], dim=axis))

    def join(self, parts: "list[Tensor]", config: ModelConfig) -> "Tensor":
        import torch

        rows = torch.cat(parts, dim=max(parts[0].ndim - 2, 0))
        return rows.transpose(-2, -1) if self.transposed else rows


@dataclass(frozen=True)
class FusedPerHead(TensorRule):
    """The foreign tensor holds query, key and value of head 0, then of head 1, and so on (BLOOM)."""

    def split(self, foreign: "Tensor", shapes: "list[Size]", config: ModelConfig) -> "list[Tensor]":
        by_head = foreign.reshape(-1, len(self.own_names), head_width(config), *foreign.shape[1:])
        return [part.flatten(0, 1) for part in by_head.unbind(1)]

    def join(self, parts: "list[Tensor]", config: ModelConfig) -> "Tensor":
        import torch

        by_head = [part.reshape(-1, head_width(config), *part.shape[1:]) for part in parts]
        return torch.stack(by_head, dim=1).flatten(0, 2)


@dataclass(frozen=True)
class FusedPerGroup(TensorRule):
    """For each key-value head, the foreign tensor holds its query heads, then its key, then its value (Falcon).

    With one key-value head this is `Fused`, with as many as query heads `FusedPerHead`.
    """

    def split(self, foreign: "Tensor", shapes: "list[Size]", config: ModelConfig) -> "list[Tensor]":
        num_kv_heads = shapes[1][0] // head_width(config)
        groups = foreign.reshape(num_kv_heads, -1, head_width(config), *foreign.shape[1:])
        return [part.flatten(0, 2) for part in (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])]

    def join(self, parts: "list[Tensor]", config: ModelConfig) -> "Tensor":
        import torch

        num_kv_heads = len(parts[1]) // head_width(config)
        groups = [part.reshape(num_kv_heads, -1, head_width(config), *part.shape[1:]) for part in parts]
        return torch.cat(groups, dim=1).flatten(0, 2)


@dataclass(frozen=True)
class FusedInBlocks(TensorRule):
    """The foreign tensor has `num_blocks` blocks of rows, each with the same share of each of ours (CodeGen)."""

    num_blocks: int = 1

    def split(self, foreign: "Tensor", shapes: "list[Size]", config: ModelConfig) -> "list[Tensor]":
        blocks = foreign.reshape(self.num_blocks, len(self.own_names), -1, *foreign.shape[1:])
        return [part.flatten(0, 1) for part in blocks.unbind(1)]

    def join(self, parts: "list[Tensor]", config: ModelConfig) -> "Tensor":
        import torch

        blocks = [part.reshape(self.num_blocks, -1, *part.shape[1:]) for part in parts]
        return torch.stack(blocks, dim=1).flatten(0, 2)


@dataclass(frozen=True)
class Alternating(TensorRule):
    """The rows of two of our tensors alternate along the last dimension of the foreign one (gpt-oss).

    If transposed, our rows are the columns of the foreign tensor.
    """

    transposed: bool = False

    def split(self, foreign: "Tensor", shapes: "list[Size]", config: ModelConfig) -> "list[Tensor]":
        parts = [foreign[..., ::2], foreign[..., 1::2]]
        return [part.transpose(-2, -1) if self.transposed else part for part in parts]

    def join(self, parts: "list[Tensor]", config: ModelConfig) -> "Tensor":
        import torch

        parts = [part.transpose(-2, -1) if self.transposed else part for part in parts]
        return torch.stack(parts, dim=-1).flatten(-2)


@dataclass(frozen=True)
class Interleaved(TensorRule):
    """The rotary pairs of a query or key matrix are neighboring rows (2j, 2j + 1); ours are rows (j, j + half)."""

    def split(self, foreign: "Tensor", shapes: "list[Size]", config: ModelConfig) -> "list[Tensor]":
        pairs = foreign.reshape(-1, head_width(config) // 2, 2, *foreign.shape[1:])
        return [pairs.transpose(1, 2).reshape(foreign.shape)]

    def join(self, parts: "list[Tensor]", config: ModelConfig) -> "Tensor":
        halves = parts[0].reshape(-1, 2, head_width(config) // 2, *parts[0].shape[1:])
        return halves.transpose(1, 2).reshape(parts[0].shape)


@dataclass(frozen=True)
class SingleRow(TensorRule):
    """The foreign tensor is a matrix whose only row is our vector (the logit bias of BART)."""

    def split(self, foreign: "Tensor", shapes: "list[Size]", config: ModelConfig) -> "list[Tensor]":
        return [foreign.squeeze(0)]

    def join(self, parts: "list[Tensor]", config: ModelConfig) -> "Tensor":
        return parts[0][None]


@dataclass(frozen=True)
class OneRow(TensorRule):
    """The foreign tensor is a vector, and ours a matrix with this as its only row (gate of a shared expert in GGUF)."""

    def split(self, foreign: "Tensor", shapes: "list[Size]", config: ModelConfig) -> "list[Tensor]":
        return [foreign.reshape(1, -1)]

    def join(self, parts: "list[Tensor]", config: ModelConfig) -> "Tensor":
        return parts[0].squeeze(0)


@dataclass(frozen=True)
class PlusOne(TensorRule):
    """The foreign tensor is 1 + our norm weight (Gemma and Nemotron in GGUF files)."""

    def split(self, foreign: "Tensor", shapes: "list[Size]", config: ModelConfig) -> "list[Tensor]":
        return [foreign - 1]

    def join(self, parts: "list[Tensor]", config: ModelConfig) -> "Tensor":
        return parts[0] + 1


# A plain string stands for Copy((string,)). Of several alternatives, those that apply to the network are used.
NameTable = Mapping[str, str | TensorRule | tuple[str | TensorRule, ...]]


def renamed(names: NameTable, changes: Mapping[str, str | None]) -> NameTable:
    """Return a table with parts of its foreign names replaced, without the entries that have a part given as None."""
    table = {}
    for name, rule in names.items():
        found = [part for part in changes if part in name]
        if any(changes[part] is None for part in found):
            continue
        for part in found:
            name = name.replace(part, changes[part] or "")
        table[name] = rule
    return table


def with_biases(modules: Mapping[str, str]) -> NameTable:
    """Return entries for the weight and the bias of each module, given as foreign name -> our name."""
    return {f"{theirs}.{part}": f"{ours}.{part}" for theirs, ours in modules.items() for part in ("weight", "bias")}


def head_width(config: ModelConfig) -> int:
    """Return the head width of grouped attention, which is the same in all layers."""
    attention = config.output_stack.layers[0].attention
    assert isinstance(attention, GroupedAttention)
    return attention.head_width


def expand_table(table: NameTable, config: ModelConfig, own_names: set[str]) -> Iterator[tuple[str, TensorRule]]:
    """Yield (foreign name, rule) for every entry that applies to this network, with all numbers filled in.

    `own_names` are the names of the network's tensors.
    """
    stacks = [stack for stack in (config.encoder, config.decoder) if stack]
    num_layers = max(len(stack.layers) for stack in stacks)
    feed_forwards = [layer.feed_forward for stack in stacks for layer in stack.layers]
    num_experts = max((part.num_experts for part in feed_forwards if isinstance(part, Experts)), default=0)
    attention = config.output_stack.layers[0].attention
    num_kv_heads = attention.num_kv_heads if isinstance(attention, GroupedAttention) else 0
    counts = {"{expert}": num_experts, "{head}": attention.num_heads, "{kv_head}": num_kv_heads}
    alternatives = ((key, rules if isinstance(rules, tuple) else (rules,)) for key, rules in table.items())
    for pattern, rule in ((key, rule) for key, rules in alternatives for rule in rules):
        rule = Copy((rule,)) if isinstance(rule, str) else rule
        for layer in range(num_layers) if "{layer}" in pattern else (0,):
            names = [name.replace("{layer}", str(layer)) for name in rule.own_names]
            present = all(re.sub(r"\[\{\w+\}\]$", "", name) in own_names for name in names)
            if not present or not _condition_holds(rule, layer, own_names, config):
                continue
            index = next((placeholder for placeholder in counts if placeholder in pattern), None)
            for number in range(counts[index]) if index else (0,):
                foreign_name = pattern.replace("{layer}", str(layer)).replace(index or "{expert}", str(number))
                filled_in = tuple(name.replace(index or "{expert}", str(number)) for name in names)
                yield foreign_name, replace(rule, own_names=filled_in)


def _condition_holds(rule: TensorRule, layer: int, own_names: set[str], config: ModelConfig) -> bool:
    if not isinstance(rule, Copy):
        return True
    if rule.only_reads and (config.classifier is None or config.classifier.reads not in rule.only_reads):
        return False
    if rule.only_placements and config.output_stack.layers[layer].placement not in rule.only_placements:
        return False
    needed, excluded = (name and name.replace("{layer}", str(layer)) for name in (rule.only_with, rule.only_without))
    return (needed is None or needed in own_names) and excluded not in own_names


def split_expert_index(own_name: str) -> tuple[str, int | None]:
    """Split '…feed_forward.gate[3]' into ('…feed_forward.gate', 3); without an index, return (own_name, None)."""
    match = re.fullmatch(r"(.+)\[(\d+)\]", own_name)
    return (match[1], int(match[2])) if match else (own_name, None)
