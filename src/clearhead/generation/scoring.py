"""Score a text: the log-probability of each token given the tokens before it.

    score(network, ids).perplexity   # exp of the mean of -log p

The first token has no score, because no token precedes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from clearhead.architecture import ModelConfig, check_tokens
from clearhead.cache import KeyValueCache, forward_step
from clearhead.errors import ClearheadError
from clearhead.generation.decoding import rotation_depends_on_length
from clearhead.model import Transformer

_CHUNK = 512  # tokens read at a time, so that the logits of a long text never exist all at once


@dataclass(frozen=True, repr=False)
class Score:
    """The log-probabilities of a text."""

    tokens: list[int]
    logprobs: list[float]  # natural logarithms; one fewer than tokens

    def __repr__(self) -> str:
        return f"Score({len(self.tokens)} tokens, perplexity {self.perplexity:.4g})"

    @property
    def perplexity(self) -> float:
        """exp of the mean of -log p; infinite if it exceeds every float."""
        return torch.tensor(self.logprobs, dtype=torch.float64).mean().neg().exp().item()


def check_can_score(config: ModelConfig) -> None:
    """Raise ClearheadError unless a model is a decoder with a head."""
    if config.decoder is None or config.is_encoder_decoder:
        raise ClearheadError(
            "scoring needs a decoder-only model; a model with an encoder generates an answer to a text, or embeds it"
        )
    if config.head is None:
        raise ClearheadError("this model has no head, so it cannot score texts; it can embed them")


@torch.inference_mode()
def score(network: Transformer, ids: Sequence[int], chunk: int = _CHUNK) -> Score:
    """Return the log-probability of every token after the first, reading `chunk` tokens at a time."""
    check_tokens(ids, network.config.output_stack)
    if len(ids) < 2:
        raise ClearheadError(
            "a text of fewer than two tokens cannot be scored, since the first token has no score; give a longer text"
        )
    if rotation_depends_on_length(network.config.output_stack):
        chunk = len(ids)
    tokens = torch.tensor([list(ids)], device=network.device)
    cache = KeyValueCache(network.config)
    logprobs: list[float] = []
    for start in range(0, len(ids) - 1, chunk):
        inputs = tokens[:, start : start + chunk]
        targets = tokens[0, start + 1 : start + chunk + 1]
        logits = forward_step(network, inputs, cache, absorb=False, last_only=False)[0, : len(targets)]
        logprobs += logits.float().log_softmax(dim=-1).gather(1, targets[:, None])[:, 0].tolist()
    return Score(list(ids), logprobs)
