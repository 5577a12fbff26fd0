"""What a picture shows of a trace: one view for each kind of attention in it, and the logit lens.

for view in views_of(trace): print(view.title, view.look(0, None).weights.shape)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from clearhead.inspection.heads import Heads, chosen
from clearhead.inspection.lens import LensRow, logit_lens
from clearhead.inspection.trace import Trace
from clearhead.inspection.tracing import text_of
from clearhead.tokenization import Tokenizer


@dataclass(frozen=True)
class Look:
    """The heads of one layer that were asked for, step by step."""

    weights: Tensor  # (N, T, S)
    scores: Tensor | None = None  # (N, T, S), before the mask
    allowed: Tensor | None = None  # (T, S), None: everything


@dataclass(frozen=True)
class View:
    title: str
    rows: Sequence[str]  # texts of the queries
    columns: Sequence[str]  # texts of the keys
    num_heads: Sequence[int]  # by layer
    look: Callable[[int, int | None], Look]  # at a layer, and at one head of it or at all


def views_of(trace: Trace) -> list[View]:
    """The decoder's attention first, then across, then the encoder's; of one stack alone its own."""
    heads = [trace.num_heads(layer) for layer in range(trace.num_layers)]
    if trace.source_texts is None:
        return [View("self-attention", trace.token_texts, trace.token_texts, heads, partial(at_itself, trace, None))]
    source_heads = [trace.num_heads(layer, "encoder") for layer in range(trace.num_layers_of("encoder"))]
    return [
        View("decoder self-attention", trace.token_texts, trace.token_texts, heads, partial(at_itself, trace, None)),
        View("cross-attention", trace.token_texts, trace.source_texts, heads, partial(across, trace)),
        View(
            "encoder self-attention",
            trace.source_texts,
            trace.source_texts,
            source_heads,
            partial(at_itself, trace, "encoder"),
        ),
    ]


@torch.no_grad()
def at_itself(trace: Trace, stack: str | None, layer: int, head: int | None) -> Look:
    return look_of(trace.self_heads(layer, stack), head)


@torch.no_grad()
def across(trace: Trace, layer: int, head: int | None) -> Look:
    return look_of(trace.cross_heads(layer), head)


def look_of(heads: Heads, head: int | None) -> Look:
    steps = chosen(heads, head, None).attended
    return Look(steps.weights[0], steps.scores[0], heads.allowed(torch.arange(heads.queries.shape[2])))


def alignment_view(alignments: Tensor, targets: Sequence[str], sources: Sequence[str]) -> View:
    """Of the recurrent baseline: (T, S), one head in one layer."""
    return View("alignment", targets, sources, [1], lambda layer, head: Look(alignments[None]))


@dataclass(frozen=True)
class Lens:
    """What each depth would say after the last few tokens, with words for its ids."""

    rows: Sequence[LensRow]
    text_of: Callable[[int], str]

    @staticmethod
    def of(trace: Trace, tokenizer: Tokenizer | None, num_tokens: int = 1) -> "Lens":
        length = len(trace.tokens)
        rows = logit_lens(trace, rows=range(max(length - num_tokens, 0), length))
        return Lens(rows, lambda token: text_of(token, tokenizer))

    @property
    def stages(self) -> list[str]:
        return [f"layer {row.layer} {row.after.replace('_', '-')}" for row in self.rows]

    @property
    def tokens(self) -> Tensor:
        """(stages, last tokens, top)."""
        return torch.stack([row.top_ids for row in self.rows]).cpu()

    @property
    def probabilities(self) -> Tensor:
        return torch.stack([row.top_probabilities for row in self.rows]).cpu()
