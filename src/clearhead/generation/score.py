"""How likely a given text is: each token's log-probability after those before it.

    score(network, ids).perplexity   # exp of the mean of -log p

The first token has none: nothing stands before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from clearhead.cache.cache import KeyValueCache
from clearhead.errors import ClearheadError
from clearhead.model.transformer import Transformer

CHUNK = 512  # tokens read at once: the logits of a long text need not exist whole


@dataclass(frozen=True)
class Score:
    tokens: list[int]
    logprobs: list[float]  # one fewer than tokens

    @property
    def perplexity(self) -> float:
        """Infinite where no number holds it."""
        return torch.tensor(self.logprobs, dtype=torch.float64).mean().neg().exp().item()


@torch.inference_mode()
def score(network: Transformer, ids: Sequence[int], chunk: int = CHUNK) -> Score:
    if len(ids) < 2:
        raise ClearheadError("a text of fewer than two tokens cannot be scored: the first has nothing before it")
    tokens = torch.tensor([list(ids)], device=network.device)
    cache = KeyValueCache(network.config)
    logprobs: list[float] = []
    for start in range(0, len(ids) - 1, chunk):
        piece, following = tokens[:, start : start + chunk], tokens[0, start + 1 : start + chunk + 1]
        logits = network(piece, cache=cache)[0, : len(following)]
        cache.advance()
        logprobs += logits.float().log_softmax(dim=-1).gather(1, following[:, None])[:, 0].tolist()
    return Score(list(ids), logprobs)
