"""Building blocks of the worked examples: their data classes, their inputs and small attention layers in float64.

steps = attend_with_scores(tensor([[1.0, 2.0]])); steps.weights   # (1, 1, 1, 2)
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.architecture import GroupedAttention
from clearhead.cache import ContiguousStore
from clearhead.model import Attention, AttentionContext, AttentionSteps, Mask, Scoring, attention_steps, fused_attention

NO_MASK = Mask()


@dataclass(frozen=True)
class Panel:
    """One matrix of an example, displayed as plain numbers or as a heatmap."""

    name: str
    values: Tensor
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    kind: Literal["numbers", "scores", "weights"] = "numbers"
    allowed: Tensor | None = None  # None: nothing is masked
    num_digits: int = 4  # significant digits that are displayed


@dataclass(frozen=True)
class TextTable:
    """A table of words and counts."""

    name: str
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Chart:
    """Lines over common x values, drawn as a small picture."""

    name: str
    x: Sequence[float]
    lines: dict[str, Sequence[float]]
    x_label: str
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Heatmap:
    """A matrix that is too large to be printed, drawn as a picture of its numbers from -1 to 1."""

    name: str
    values: Tensor
    row_label: str
    column_label: str


Part = Panel | TextTable | Chart | Heatmap


@dataclass(frozen=True)
class Example:
    """A worked example: an explanation, and the matrices, tables and pictures that it is about."""

    number: str  # of the statement in the book, such as A1; several are separated by a comma and a space
    title: str
    explanation: str
    panels: Sequence[Part]


def read_asset(name: str) -> str:
    """Return the text of a file in course/assets."""
    return files("clearhead.course").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _book_inputs() -> dict[str, Any]:
    """Return the inputs of all examples."""
    return dict(json.loads(read_asset("inputs.json")))


def inputs(example: str) -> dict[str, Any]:
    """Return the inputs of one example by name."""
    return dict(_book_inputs()[example])


def tensor(rows: Any) -> Tensor:
    """Return a float64 tensor."""
    return torch.tensor(rows, dtype=torch.float64)


def single_head(w_q: Tensor, w_k: Tensor, w_v: Tensor) -> Attention:
    """Return an attention layer with one head, these matrices (as in x·W) and the identity as output projection."""
    width, head, value = *w_q.shape, w_v.shape[1]
    config = GroupedAttention(num_heads=1, num_kv_heads=1, head_width=head, value_width=value)
    attention = Attention(config, width).double()
    for linear, matrix in ((attention.query, w_q), (attention.key, w_k), (attention.value, w_v)):
        linear.weight.copy_(matrix.T)
    attention.output.weight.copy_(torch.eye(width, value))
    return attention


def attend_with_scores(scores: Tensor, mask: Mask = NO_MASK, scale: float = 1.0) -> AttentionSteps:
    """Run attention on given scores (T, S): the queries are the scores, the keys and values are unit vectors."""
    unit = torch.eye(scores.shape[-1], dtype=scores.dtype)[None, None]
    return attention_steps(scores[None, None], unit, unit, Scoring(mask=mask, scale=scale))


def causal_context(num_tokens: int) -> AttentionContext:
    """Return the context of causal attention without positions."""
    return AttentionContext(Mask(causal=True), fused_attention, torch.arange(num_tokens)[None])


def step_context(step: int, store: ContiguousStore | None) -> AttentionContext:
    """Return the context of one decoding step, with the store as its cache."""
    write_cache = None if store is None else partial(store.write, step)
    return AttentionContext(NO_MASK, fused_attention, torch.tensor([[step]]), write_cache=write_cache)


def numbered(name: str, count: int) -> list[str]:
    """Return labels such as token 1, token 2."""
    return [f"{name} {number}" for number in range(1, count + 1)]
