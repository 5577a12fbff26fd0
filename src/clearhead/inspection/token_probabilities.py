"""The probability that a model gives to each token of a traced text.

score_tokens(trace)   # (T - 1,): of each token but the first, given those before it
"""

import torch
from torch import Tensor

from clearhead.inspection.trace import Trace

_CHUNK = 64  # positions: their logits over 128,000 tokens take 33 MB


@torch.no_grad()
def score_tokens(trace: Trace) -> Tensor:
    """Return the probability of each token of a decoder's trace but the first, given those before it (T - 1,)."""
    states, tokens = trace.residual(trace.num_layers), torch.tensor(trace.tokens)
    parts = [torch.empty(0)]
    for start in range(0, len(tokens) - 1, _CHUNK):
        following = tokens[start + 1 : start + 1 + _CHUNK]
        logits = trace.compute_logits(states[start : start + len(following)]).float()
        parts.append(logits.softmax(dim=-1).gather(1, following.to(logits.device)[:, None])[:, 0].cpu())
    return torch.cat(parts)
