"""Tables of foreign tensor names, and the few ways in which a foreign tensor holds ours.

    NAMES = {"h.{layer}.attn.c_attn.weight": Fused(("…query.weight", "…key.weight", "…value.weight"), transposed=True)}

Each row works both ways, so one table loads and saves. `{layer}` and `{expert}` stand for numbers; `name[3]` is
one expert's slice of our stacked tensor. A row applies where the network has the tensors it names.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clearhead.model.config import Experts, GroupedAttention, ModelConfig


@dataclass(frozen=True)
class Copy:
    """One foreign tensor is one of ours, perhaps stored (in, out)."""

    own: tuple[str, ...]
    transposed: bool = False

    def split(self, foreign: Tensor, shapes: list[torch.Size], config: ModelConfig) -> list[Tensor]:
        return [foreign.transpose(-2, -1) if self.transposed else foreign.reshape(_squeezed(foreign, shapes[0]))]

    def join(self, own: list[Tensor], config: ModelConfig) -> Tensor:
        return own[0].transpose(-2, -1) if self.transposed else own[0]


@dataclass(frozen=True)
class Fused:
    """Several of ours one after another along the rows."""

    own: tuple[str, ...]
    transposed: bool = False

    def split(self, foreign: Tensor, shapes: list[torch.Size], config: ModelConfig) -> list[Tensor]:
        rows = foreign.transpose(-2, -1) if self.transposed else foreign
        axis = max(rows.ndim - 2, 0)
        return list(rows.split([shape[axis] for shape in shapes], dim=axis))

    def join(self, own: list[Tensor], config: ModelConfig) -> Tensor:
        rows = torch.cat(own, dim=max(own[0].ndim - 2, 0))
        return rows.transpose(-2, -1) if self.transposed else rows


@dataclass(frozen=True)
class FusedPerHead:
    """Query, key and value of head 0, then of head 1, … (BLOOM)."""

    own: tuple[str, ...]

    def split(self, foreign: Tensor, shapes: list[torch.Size], config: ModelConfig) -> list[Tensor]:
        by_head = foreign.reshape(-1, len(self.own), head_width(config), *foreign.shape[1:])
        return [part.flatten(0, 1) for part in by_head.unbind(1)]

    def join(self, own: list[Tensor], config: ModelConfig) -> Tensor:
        by_head = [part.reshape(-1, head_width(config), *part.shape[1:]) for part in own]
        return torch.stack(by_head, dim=1).flatten(0, 2)


@dataclass(frozen=True)
class Interleaved:
    """Query or key rows whose rotary pairs are neighbours (2j, 2j + 1); ours are (j, j + half)."""

    own: tuple[str, ...]

    def split(self, foreign: Tensor, shapes: list[torch.Size], config: ModelConfig) -> list[Tensor]:
        pairs = foreign.reshape(-1, head_width(config) // 2, 2, *foreign.shape[1:])
        return [pairs.transpose(1, 2).reshape(foreign.shape)]

    def join(self, own: list[Tensor], config: ModelConfig) -> Tensor:
        halves = own[0].reshape(-1, 2, head_width(config) // 2, *own[0].shape[1:])
        return halves.transpose(1, 2).reshape(own[0].shape)


Row = Copy | Fused | FusedPerHead | Interleaved
Table = Mapping[str, str | Row]


def head_width(config: ModelConfig) -> int:
    attention = config.output_stack.layers[0].attention
    assert isinstance(attention, GroupedAttention)
    return attention.head_width


def _squeezed(foreign: Tensor, shape: torch.Size) -> torch.Size:
    """BART keeps its logit bias as (1, V); any other difference is left for the caller to report."""
    return shape if foreign.shape == (1, *shape) else foreign.shape


def expand(table: Table, config: ModelConfig, own_names: set[str]) -> dict[str, Row]:
    """The rows that apply to this network, placeholders filled in: foreign name -> row."""
    stacks = [stack for stack in (config.encoder, config.decoder) if stack]
    num_layers = max(len(stack.layers) for stack in stacks)
    mixtures = [layer.feed_forward for stack in stacks for layer in stack.layers]
    num_experts = max((part.num_experts for part in mixtures if isinstance(part, Experts)), default=0)
    rows: dict[str, Row] = {}
    for pattern, row in table.items():
        row = Copy((row,)) if isinstance(row, str) else row
        for numbers in _numberings(pattern, num_layers, num_experts):
            own = tuple(_filled(name, numbers) for name in row.own)
            if all(parse_target(name)[0] in own_names for name in own):
                rows[_filled(pattern, numbers)] = replace(row, own=own)
    return rows


def _numberings(pattern: str, num_layers: int, num_experts: int) -> Iterator[dict[str, int]]:
    for layer in range(num_layers) if "{layer}" in pattern else (0,):
        for expert in range(num_experts) if "{expert}" in pattern else (0,):
            yield {"layer": layer, "expert": expert}


def _filled(pattern: str, numbers: Mapping[str, int]) -> str:
    return pattern.replace("{layer}", str(numbers["layer"])).replace("{expert}", str(numbers["expert"]))


def parse_target(own: str) -> tuple[str, int | None]:
    """'…feed_forward.gate[3]' -> ('…feed_forward.gate', 3)."""
    match = re.fullmatch(r"(.+)\[(\d+)\]", own)
    return (match[1], int(match[2])) if match else (own, None)
