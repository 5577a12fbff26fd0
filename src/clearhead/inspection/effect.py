"""The effect of an intervention on the next-token distribution.

effect = Effect.from_logits(before, after); effect.divergence, effect.top_after(3)   # logits (V,) of one position
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from clearhead.inspection.attention_heads import check_index


@dataclass(frozen=True)
class Effect:
    """The log-probabilities (V,) of the next token before and after an intervention, in float32."""

    before: Tensor
    after: Tensor

    @staticmethod
    def from_logits(before: Tensor, after: Tensor) -> "Effect":
        """Return the effect from the logits (V,) before and after."""
        return Effect(before.float().log_softmax(dim=-1), after.float().log_softmax(dim=-1))

    @property
    def divergence(self) -> float:
        """KL(before ‖ after) in nats; 0 if nothing changed."""
        return functional.kl_div(self.after, self.before, reduction="sum", log_target=True).item()

    def top_before(self, count: int = 5) -> list[tuple[int, float]]:
        """Return the most likely tokens before the intervention, with their probabilities."""
        return most_likely(self.before, count)

    def top_after(self, count: int = 5) -> list[tuple[int, float]]:
        """Return the most likely tokens after the intervention, with their probabilities."""
        return most_likely(self.after, count)

    def gain(self, token: int) -> float:
        """Return how much the log-probability of a token increased."""
        token = check_index("token", token, len(self.before))
        return (self.after[token] - self.before[token]).item()


def most_likely(logprobs: Tensor, count: int) -> list[tuple[int, float]]:
    """Return the `count` most likely tokens with their probabilities, for log-probabilities (V,)."""
    best = logprobs.exp().topk(min(count, len(logprobs)))
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
