"""Trace the recurrent baseline: the weights of its attention over the source, and its logits.

traced = trace_recurrent(network, source=[4, 7, 2], target=[1, 9]); traced.cross_attention()   # (T, S)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.inspection.attention_heads import check_index
from clearhead.inspection.recording import evaluation_mode
from clearhead.inspection.token_labels import token_text
from clearhead.inspection.views import AttentionView, alignment_view
from clearhead.model import RecurrentTranslator
from clearhead.tokenization import Tokenizer


@dataclass(frozen=True)
class RecurrentTrace:
    """The record of one forward pass of the recurrent encoder-decoder."""

    tokens: list[int]
    source_tokens: list[int]
    alignments: Tensor  # (T, S), rows sum to 1
    logits: Tensor  # (T, V)
    tokenizer: Tokenizer | None = None

    num_layers = 1  # of attention, whatever the number of recurrent layers

    @property
    def heading(self) -> str:
        """The text that the decoder read."""
        return "".join(self._texts(self.tokens))

    @property
    def size(self) -> str:
        """The numbers of tokens as text."""
        return f"recurrent network, {len(self.tokens)} tokens after {len(self.source_tokens)} source tokens"

    def num_heads(self, layer: int) -> int:
        """Return 1: a recurrent decoder has one alignment."""
        return 1

    def attention_views(self) -> list[AttentionView]:
        """Return the alignment to display."""
        return [alignment_view(self.alignments, self._texts(self.tokens), self._texts(self.source_tokens))]

    def _texts(self, tokens: Sequence[int]) -> list[str]:
        return [token_text(token, self.tokenizer) for token in tokens]

    def cross_attention(self, rows: Iterable[int] | None = None) -> Tensor:
        """Return the weights (T, S) with which the step at each target token attends to the source tokens."""
        if rows is None:
            return self.alignments
        return self.alignments[[check_index("row", row, len(self.tokens)) for row in rows]]


@torch.no_grad()
def trace_recurrent(
    network: RecurrentTranslator, source: Sequence[int], target: Sequence[int], tokenizer: Tokenizer | None = None
) -> RecurrentTrace:
    """Run one forward pass over a source and a target, given as token ids, and return its trace.

    Raise ClearheadError if the network has no attention. tokenizer: gives the texts of the tokens.
    """
    device = network.head.weight.device
    source_tokens = torch.tensor([list(source)], device=device)
    target_tokens = torch.tensor([list(target)], device=device)
    with evaluation_mode(network):
        encoder_output = network.encode(source_tokens)
        alignments = network.attention_weights(target_tokens, encoder_output)[0]
        logits = network.decode(target_tokens, encoder_output)[0]
    return RecurrentTrace(list(target), list(source), alignments, logits, tokenizer)
