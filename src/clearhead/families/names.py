"""Tables of foreign tensor names, and the few ways in which a foreign tensor holds ours.

    NAMES = {"h.{layer}.attn.c_attn.weight": Fused(("…query.weight", "…key.weight", "…value.weight"), transposed=True)}

Each row works both ways, so one table loads and saves. `{layer}` and `{expert}` stand for numbers; `name[3]` is
one expert's slice of our stacked tensor. A row applies where the network has the tensors it names.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clearhead.architecture import Experts, GroupedAttention, ModelConfig

if TYPE_CHECKING:  # who only asks for presets need not wait for torch
    from torch import Size, Tensor

LAYER = "decoder.layers.{layer}"
QKV_WEIGHTS = tuple(f"{LAYER}.attention.{part}.weight" for part in ("query", "key", "value"))
QKV_BIASES = tuple(f"{LAYER}.attention.{part}.bias" for part in ("query", "key", "value"))
AFTER_LAST = "{after_last}"  # in a pattern: the number that one layer more would have


@dataclass(frozen=True)
class Copy:
    """One foreign tensor is one of ours, perhaps stored (in, out).

    Where the foreign name depends on what else there is (T5: `wi`, but `wi_1` beside a gate), `beside` and `without`
    name one of ours that must or must not be in the network.
    """

    own: tuple[str, ...]
    transposed: bool = False
    beside: str | None = None
    without: str | None = None

    def split(self, foreign: "Tensor", shapes: "list[Size]", config: ModelConfig) -> "list[Tensor]":
        return [foreign.transpose(-2, -1) if self.transposed else foreign]

    def join(self, own: "list[Tensor]", config: ModelConfig) -> "Tensor":
        return own[0].transpose(-2, -1) if self.transposed else own[0]


@dataclass(frozen=True)
class Fused:
    """Several of ours one after another along the rows."""

    own: tuple[str, ...]
    transposed: bool = False

    def split(self, foreign: "Tensor", shapes: "list[Size]", config: ModelConfig) -> "list[Tensor]":
        rows = foreign.transpose(-2, -1) if self.transposed else foreign
        axis = max(rows.ndim - 2, 0)
        return list(rows.split([shape[axis] for shape in shapes], dim=axis))

    def join(self, own: "list[Tensor]", config: ModelConfig) -> "Tensor":
        import torch

        rows = torch.cat(own, dim=max(own[0].ndim - 2, 0))
        return rows.transpose(-2, -1) if self.transposed else rows


@dataclass(frozen=True)
class FusedPerHead:
    """Query, key and value of head 0, then of head 1, … (BLOOM)."""

    own: tuple[str, ...]

    def split(self, foreign: "Tensor", shapes: "list[Size]", config: ModelConfig) -> "list[Tensor]":
        by_head = foreign.reshape(-1, len(self.own), head_width(config), *foreign.shape[1:])
        return [part.flatten(0, 1) for part in by_head.unbind(1)]

    def join(self, own: "list[Tensor]", config: ModelConfig) -> "Tensor":
        import torch

        by_head = [part.reshape(-1, head_width(config), *part.shape[1:]) for part in own]
        return torch.stack(by_head, dim=1).flatten(0, 2)


@dataclass(frozen=True)
class Interleaved:
    """Query or key rows whose rotary pairs are neighbours (2j, 2j + 1); ours are (j, j + half)."""

    own: tuple[str, ...]

    def split(self, foreign: "Tensor", shapes: "list[Size]", config: ModelConfig) -> "list[Tensor]":
        pairs = foreign.reshape(-1, head_width(config) // 2, 2, *foreign.shape[1:])
        return [pairs.transpose(1, 2).reshape(foreign.shape)]

    def join(self, own: "list[Tensor]", config: ModelConfig) -> "Tensor":
        halves = own[0].reshape(-1, 2, head_width(config) // 2, *own[0].shape[1:])
        return halves.transpose(1, 2).reshape(own[0].shape)


@dataclass(frozen=True)
class SingleRow:
    """A vector stored as the one row of a matrix (the logit bias of BART)."""

    own: tuple[str, ...]

    def split(self, foreign: "Tensor", shapes: "list[Size]", config: ModelConfig) -> "list[Tensor]":
        return [foreign.squeeze(0)]

    def join(self, own: "list[Tensor]", config: ModelConfig) -> "Tensor":
        return own[0][None]


@dataclass(frozen=True)
class PlusOne:
    """A norm weight stored as 1 + ours (Gemma in GGUF)."""

    own: tuple[str, ...]

    def split(self, foreign: "Tensor", shapes: "list[Size]", config: ModelConfig) -> "list[Tensor]":
        return [foreign - 1]

    def join(self, own: "list[Tensor]", config: ModelConfig) -> "Tensor":
        return own[0] + 1


Row = Copy | Fused | FusedPerHead | Interleaved | SingleRow | PlusOne
Table = Mapping[str, str | Row]


def head_width(config: ModelConfig) -> int:
    attention = config.output_stack.layers[0].attention
    assert isinstance(attention, GroupedAttention)
    return attention.head_width


def expand(table: Table, config: ModelConfig, own_names: set[str]) -> Iterator[tuple[str, Row]]:
    """The rows that apply to this network, placeholders filled in: pairs of foreign name and row."""
    stacks = [stack for stack in (config.encoder, config.decoder) if stack]
    num_layers = max(len(stack.layers) for stack in stacks)
    mixtures = [layer.feed_forward for stack in stacks for layer in stack.layers]
    num_experts = max((part.num_experts for part in mixtures if isinstance(part, Experts)), default=0)
    for pattern, row in table.items():
        row = Copy((row,)) if isinstance(row, str) else row
        for layer in range(num_layers) if "{layer}" in pattern else (0,):
            own = [name.replace("{layer}", str(layer)) for name in row.own]
            present = all(name.removesuffix("[{expert}]") in own_names for name in own)
            if not present or not _has_its_neighbours(row, layer, own_names):
                continue
            for expert in range(num_experts) if "{expert}" in pattern else (0,):
                foreign = pattern.replace("{layer}", str(layer)).replace("{expert}", str(expert))
                yield foreign, replace(row, own=tuple(name.replace("{expert}", str(expert)) for name in own))


def _has_its_neighbours(row: Row, layer: int, own_names: set[str]) -> bool:
    if not isinstance(row, Copy):
        return True
    beside, without = (name and name.replace("{layer}", str(layer)) for name in (row.beside, row.without))
    return (beside is None or beside in own_names) and without not in own_names


def parse_target(own: str) -> tuple[str, int | None]:
    """'…feed_forward.gate[3]' -> ('…feed_forward.gate', 3)."""
    match = re.fullmatch(r"(.+)\[(\d+)\]", own)
    return (match[1], int(match[2])) if match else (own, None)
