"""Trace the recurrent baseline: the weights of its attention over the source, and its logits.

traced = trace_recurrent(network, source=[4, 7, 2], target=[1, 9]); traced.cross_attention()   # (T, S)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.inspection.attention_heads import check_index
from clearhead.inspection.recording import evaluation_mode
from clearhead.model import RecurrentTranslator


@dataclass(frozen=True)
class RecurrentTrace:
    """The record of one forward pass of the recurrent encoder-decoder."""

    tokens: list[int]
    source_tokens: list[int]
    alignments: Tensor  # (T, S), rows sum to 1
    logits: Tensor  # (T, V)

    def cross_attention(self, rows: Iterable[int] | None = None) -> Tensor:
        """Return the weights (T, S) with which the step at each target token attends to the source tokens."""
        if rows is None:
            return self.alignments
        return self.alignments[[check_index("row", row, len(self.tokens)) for row in rows]]


@torch.no_grad()
def trace_recurrent(network: RecurrentTranslator, source: Sequence[int], target: Sequence[int]) -> RecurrentTrace:
    """Run one forward pass over a source and a target, given as token ids, and return its trace."""
    device = network.head.weight.device
    source_tokens = torch.tensor([list(source)], device=device)
    target_tokens = torch.tensor([list(target)], device=device)
    with evaluation_mode(network):
        encoder_output = network.encode(source_tokens)
        alignments = network.attention_weights(target_tokens, encoder_output)[0]
        return RecurrentTrace(list(target), list(source), alignments, network.decode(target_tokens, encoder_output)[0])
