"""The same question put to the recurrent baseline: where in the source does each step look?

traced = trace_recurrent(network, source=[4, 7, 2], target=[1, 9]); traced.cross_attention()   # (T, S)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.inspection.heads import index
from clearhead.inspection.record import resting
from clearhead.model import RecurrentTranslator


@dataclass(frozen=True)
class RecurrentTrace:
    tokens: list[int]
    source_tokens: list[int]
    alignments: Tensor  # (T, S), rows sum to 1
    logits: Tensor  # (T, V)

    def cross_attention(self, rows: Iterable[int] | None = None) -> Tensor:
        """(T, S): where in the source the step that reads each token looks."""
        if rows is None:
            return self.alignments
        return self.alignments[[index("row", row, len(self.tokens)) for row in rows]]


@torch.no_grad()
def trace_recurrent(network: RecurrentTranslator, source: Sequence[int], target: Sequence[int]) -> RecurrentTrace:
    device = network.head.weight.device
    read, said = torch.tensor([list(source)], device=device), torch.tensor([list(target)], device=device)
    with resting(network):
        encoder_output = network.encode(read)
        alignments = network.attention_weights(said, encoder_output)[0]
        return RecurrentTrace(list(target), list(source), alignments, network.decode(said, encoder_output)[0])
