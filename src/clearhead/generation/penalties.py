"""Tokens that have occurred made less likely, or more: pure functions on logits (B, V), one setting for each row.

counts = TokenCounts.of(prompts, outputs, vocab_size); logits = penalize_repetition(logits, counts.seen, penalty)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenCounts:
    """How often each token of the vocabulary occurs in each row."""

    prompt: Tensor  # (B, V) int32
    output: Tensor  # (B, V) int32

    @staticmethod
    def of(
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> "TokenCounts":
        return TokenCounts(count(prompts, vocab_size).to(device), count(outputs, vocab_size).to(device))

    @property
    def seen(self) -> Tensor:
        """(B, V) bool: in the prompt or the output."""
        return (self.prompt > 0) | (self.output > 0)

    def add(self, tokens: Tensor) -> "TokenCounts":
        """The counts after each row has generated one more token; tokens (B,)."""
        one = torch.ones_like(tokens, dtype=self.output.dtype)[:, None]
        return TokenCounts(self.prompt, self.output.scatter_add(1, tokens[:, None], one))


def count(rows: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    """(B, V) int32; ids beyond the vocabulary are left out, since no logit belongs to them."""
    counted = [torch.bincount(torch.tensor(row, dtype=torch.int64), minlength=vocab_size) for row in rows]
    return torch.stack([row[:vocab_size] for row in counted]).int()


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Logits of seen tokens divided by `penalty` (B, 1); negative ones times it, so that both fall (transformers)."""
    penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, penalized, logits)


def penalize_frequency(logits: Tensor, output_counts: Tensor, penalty: Tensor) -> Tensor:
    """logit - count · penalty (OpenAI); penalty (B, 1)."""
    return logits - output_counts * penalty


def penalize_presence(logits: Tensor, output_counts: Tensor, penalty: Tensor) -> Tensor:
    """logit - penalty, if the output has the token at all (OpenAI); penalty (B, 1)."""
    return logits - (output_counts > 0) * penalty
