"""How likely a given text is: each token's log-probability after those before it.

    score(network, ids).perplexity   # exp of the mean of -log p

The first token has none: nothing stands before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from clearhead.architecture import ModelConfig
from clearhead.cache import KeyValueCache
from clearhead.errors import ClearheadError
from clearhead.generation.decode import turns_by_length
from clearhead.generation.prompts import check_tokens
from clearhead.model import Transformer

CHUNK = 512  # tokens read at once: the logits of a long text need not exist whole


@dataclass(frozen=True)
class Score:
    tokens: list[int]
    logprobs: list[float]  # one fewer than tokens

    @property
    def perplexity(self) -> float:
        """Infinite where no number holds it."""
        return torch.tensor(self.logprobs, dtype=torch.float64).mean().neg().exp().item()


def check_scores(config: ModelConfig) -> None:
    if config.decoder is None or config.is_encoder_decoder:
        raise ClearheadError(
            "only a decoder alone scores a text; a model with an encoder generates an answer to it, or embeds it"
        )
    if config.head is None:
        raise ClearheadError("this model has no head: it embeds texts, and does not score them")


@torch.inference_mode()
def score(network: Transformer, ids: Sequence[int], chunk: int = CHUNK) -> Score:
    check_tokens(ids, network.config.output_stack)
    if len(ids) < 2:
        raise ClearheadError("a text of fewer than two tokens cannot be scored: the first has nothing before it")
    if turns_by_length(network.config.output_stack):
        chunk = len(ids)
    tokens = torch.tensor([list(ids)], device=network.device)
    cache = KeyValueCache(network.config)
    logprobs: list[float] = []
    for start in range(0, len(ids) - 1, chunk):
        piece, following = tokens[:, start : start + chunk], tokens[0, start + 1 : start + chunk + 1]
        logits = network(piece, cache=cache)[0, : len(following)]
        cache.advance()
        logprobs += logits.float().log_softmax(dim=-1).gather(1, following[:, None])[:, 0].tolist()
    return Score(list(ids), logprobs)
