"""Attention matrices to display: one view for each kind of attention in a trace, and a table of the logit lens.

for view in attention_views(trace): print(view.title, view.matrices(0, None).weights.shape)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.inspection.attention_heads import AttentionHeads, select_heads
from clearhead.inspection.lens import LensPrediction, logit_lens
from clearhead.inspection.trace import Trace
from clearhead.inspection.tracing import token_text
from clearhead.tokenization import Tokenizer


@dataclass(frozen=True)
class AttentionMatrices:
    """The steps of attention of the requested heads of one layer."""

    weights: Tensor  # (N, T, S)
    scores: Tensor | None = None  # (N, T, S), before the mask
    allowed: Tensor | None = None  # (T, S); None: nothing is masked


@dataclass(frozen=True)
class AttentionView:
    """One kind of attention, with the token texts of its queries and keys."""

    title: str
    rows: Sequence[str]  # texts of the queries
    columns: Sequence[str]  # texts of the keys
    num_heads: Sequence[int]  # of each layer
    matrices: Callable[[int, int | None], AttentionMatrices]  # of a layer, and one head of it or all (None)


def attention_views(trace: Trace) -> list[AttentionView]:
    """Return the views of a trace: decoder, cross- and encoder attention, or the only one of a model with one stack."""

    def self_attention(title: str, texts: Sequence[str], stack: str | None) -> AttentionView:
        def matrices(layer: int, head: int | None) -> AttentionMatrices:
            return _compute_matrices(trace.self_heads(layer, stack), head)

        num_heads = [trace.num_heads(layer, stack) for layer in range(trace.num_layers_of(stack))]
        return AttentionView(title, texts, texts, num_heads, matrices)

    if trace.source_texts is None:
        return [self_attention("self-attention", trace.token_texts, None)]
    decoder = self_attention("decoder self-attention", trace.token_texts, "decoder")

    def cross_matrices(layer: int, head: int | None) -> AttentionMatrices:
        return _compute_matrices(trace.cross_heads(layer), head)

    return [
        decoder,
        AttentionView("cross-attention", trace.token_texts, trace.source_texts, decoder.num_heads, cross_matrices),
        self_attention("encoder self-attention", trace.source_texts, "encoder"),
    ]


@torch.no_grad()
def _compute_matrices(heads: AttentionHeads, head: int | None) -> AttentionMatrices:
    """Return the matrices of one head, or of all heads, of a layer."""
    steps = select_heads(heads, head, None).compute()
    return AttentionMatrices(steps.weights[0], steps.scores[0], heads.allowed(torch.arange(heads.queries.shape[2])))


def alignment_view(alignments: Tensor, targets: Sequence[str], sources: Sequence[str]) -> AttentionView:
    """Return the view of a recurrent model's alignments (T, S): one head in one layer."""
    return AttentionView("alignment", targets, sources, [1], lambda layer, head: AttentionMatrices(alignments[None]))


@dataclass(frozen=True)
class LensTable:
    """The logit lens over the last few tokens, with a function that gives the text of a token id."""

    predictions: Sequence[LensPrediction]
    token_text: Callable[[int], str]

    @staticmethod
    def from_trace(trace: Trace, tokenizer: Tokenizer | None, num_tokens: int = 1) -> "LensTable":
        """Compute the logit lens over the last `num_tokens` tokens of a trace."""
        length = len(trace.tokens)
        predictions = logit_lens(trace, positions=range(max(length - num_tokens, 0), length))
        return LensTable(predictions, lambda token: token_text(token, tokenizer))

    @property
    def stages(self) -> list[str]:
        """The names of the depths, such as "layer 3 feed-forward"."""
        return [f"layer {one.layer} {one.after.replace('_', '-')}" for one in self.predictions]

    @property
    def tokens(self) -> Tensor:
        """The most likely token ids (stages, tokens, top)."""
        return torch.stack([one.top_ids for one in self.predictions]).cpu()

    @property
    def probabilities(self) -> Tensor:
        """The probabilities of these tokens (stages, tokens, top)."""
        return torch.stack([one.top_probabilities for one in self.predictions]).cpu()
