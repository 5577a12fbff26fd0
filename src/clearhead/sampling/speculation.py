"""Accept or reject drafted tokens, so that the result is distributed as without drafts (Leviathan et al. 2023).

tokens = accept_tokens(logits, Draft([5, 7]), parameters, steps)    # (n + 1, V) -> at most n + 1 tokens
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from clearhead.sampling.choose import adjust_logits, filter_logits
from clearhead.sampling.parameters import SamplingParameters
from clearhead.sampling.penalties import TokenCounts
from clearhead.sampling.randomness import draw_tokens, splitmix, uniforms

# A step draws three random numbers, which must be independent. The token uses splitmix(seed, step), as without drafts.
# The seeds of the draft and of its acceptance are splitmix(seed, -1) and splitmix(seed, -2), which no step uses.
_DRAFT_SEED, _ACCEPTANCE_SEED = -1, -2


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next."""

    tokens: list[int]
    probabilities: Tensor | None = None  # (n, V) that each was drawn from; None: each had probability 1

    def cut(self, count: int) -> "Draft":
        """Return the first `count` tokens."""
        return Draft(self.tokens[:count], None if self.probabilities is None else self.probabilities[:count])


def accept_tokens(
    logits: Tensor, draft: Draft, parameters: SamplingParameters, steps: Tensor, counts: TokenCounts | None = None
) -> list[int]:
    """Return the accepted tokens of a draft and one more token; logits (n + 1, V).

    parameters, steps and counts are those of n + 1 sequences: without the draft, with its first token, and so on.

    A token x drawn from q is accepted with probability min(1, p(x) / q(x)). In place of the first rejected token
    another one is drawn from max(0, p - q), normalized; either way the token is distributed as p (Leviathan et al.
    2023, appendix A.1). If all are accepted, the next token is drawn from p, which is the same rule with q = 0.
    """
    count = len(draft.tokens)
    p = token_probabilities(logits, parameters, steps, counts)
    drafted = torch.tensor(draft.tokens, dtype=torch.int64, device=p.device)
    if draft.probabilities is None:
        q = one_hot(drafted, p.shape[1]).double()
    else:
        q = draft.probabilities.to(p.device)
    q = torch.cat((q, torch.zeros_like(p[:1])))
    chance = uniforms(_derive_seeds(parameters, _ACCEPTANCE_SEED), steps, 1)[:count, 0]
    accepted = chance * q[range(count), drafted] < p[range(count), drafted]
    num_accepted = int(accepted.long().cumprod(dim=0).sum())
    rest = (p - q)[num_accepted].clamp(min=0)
    token = draw_tokens(rest.log()[None], parameters.seeds[:1], steps[num_accepted, None])
    return [*draft.tokens[:num_accepted], int(token)]


def draw_draft(probabilities: Tensor, parameters: SamplingParameters, steps: Tensor) -> int:
    """Draw a token of a draft from probabilities (1, V)."""
    return int(draw_tokens(probabilities.log(), _derive_seeds(parameters, _DRAFT_SEED), steps))


def token_probabilities(
    logits: Tensor, parameters: SamplingParameters, steps: Tensor, counts: TokenCounts | None = None
) -> Tensor:
    """Return the probabilities that `next_tokens` draws from (B, V) in float64; one-hot if greedy."""
    logits = adjust_logits(logits.to(steps.device).float(), parameters, steps, counts)
    if parameters.all_greedy:
        return one_hot(logits.argmax(dim=-1), logits.shape[-1]).double()
    return filter_logits(logits, parameters).double().softmax(dim=-1)


def _derive_seeds(parameters: SamplingParameters, number: int) -> Tensor:
    """Return number `number` of each sequence's seed, to be used as a seed itself."""
    return splitmix(parameters.seeds, torch.full_like(parameters.seeds, number))
