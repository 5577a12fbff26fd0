"""Penalties on tokens that have occurred: pure functions on logits (B, V) with one penalty per sequence.

counts = TokenCounts.from_tokens(prompts, outputs, vocab_size)
logits = penalize_repetition(logits, counts.seen, penalty)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenCounts:
    """How often each token of the vocabulary occurs in each sequence."""

    prompt: Tensor  # (B, V) int32
    output: Tensor  # (B, V) int32

    @staticmethod
    def from_tokens(
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> "TokenCounts":
        """Count the tokens of the prompts and outputs of a batch."""
        return TokenCounts(_count_tokens(prompts, vocab_size).to(device), _count_tokens(outputs, vocab_size).to(device))

    @property
    def seen(self) -> Tensor:
        """Whether each token occurs in the prompt or the output (B, V)."""
        return (self.prompt > 0) | (self.output > 0)

    def add(self, tokens: Tensor) -> "TokenCounts":
        """Return the counts after each sequence has generated one more token; tokens (B,)."""
        one = torch.ones_like(tokens, dtype=self.output.dtype)[:, None]
        return TokenCounts(self.prompt, self.output.scatter_add(1, tokens[:, None], one))


def _count_tokens(sequences: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    """Return counts (B, V) int32. Ids beyond the vocabulary are ignored, since they have no logit."""
    counts = [torch.bincount(torch.tensor(each, dtype=torch.int64), minlength=vocab_size) for each in sequences]
    return torch.stack([row[:vocab_size] for row in counts]).int()


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Divide positive logits of seen tokens by `penalty` (B, 1) and multiply negative ones by it (transformers)."""
    penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, penalized, logits)


def penalize_frequency(logits: Tensor, output_counts: Tensor, penalty: Tensor) -> Tensor:
    """Return logit - count · penalty (OpenAI); penalty (B, 1)."""
    return logits - output_counts * penalty


def penalize_presence(logits: Tensor, output_counts: Tensor, penalty: Tensor) -> Tensor:
    """Return logit - penalty for tokens that occur in the output (OpenAI); penalty (B, 1)."""
    return logits - (output_counts > 0) * penalty
