"""What a change in the network does to its next word: likeliest tokens before and after, and how far they are apart.

effect = Effect.of(before, after); effect.divergence, effect.top_after(3)   # logits (V,) of one place
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from clearhead.inspection.heads import index


@dataclass(frozen=True)
class Effect:
    """Both distributions (V,) as log-probabilities in float32, over the token after one place of the text."""

    before: Tensor
    after: Tensor

    @staticmethod
    def of(before: Tensor, after: Tensor) -> "Effect":
        """From logits (V,)."""
        return Effect(before.float().log_softmax(dim=-1), after.float().log_softmax(dim=-1))

    @property
    def divergence(self) -> float:
        """KL(before ‖ after) in nats: 0 where nothing changed."""
        return functional.kl_div(self.after, self.before, reduction="sum", log_target=True).item()

    def top_before(self, count: int = 5) -> list[tuple[int, float]]:
        """The likeliest tokens with their probabilities."""
        return likeliest(self.before, count)

    def top_after(self, count: int = 5) -> list[tuple[int, float]]:
        return likeliest(self.after, count)

    def gain(self, token: int) -> float:
        """How much likelier a token has become, as a difference of log-probabilities."""
        token = index("token", token, len(self.before))
        return (self.after[token] - self.before[token]).item()


def likeliest(logprobs: Tensor, count: int) -> list[tuple[int, float]]:
    best = logprobs.exp().topk(min(count, len(logprobs)))
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
