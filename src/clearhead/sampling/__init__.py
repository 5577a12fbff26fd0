"""Turn logits into tokens: options as tensors, penalties, filters, and reproducible random numbers.

    parameters = SamplingParameters.from_options([SamplingOptions(temperature=0.8, seed=1)], vocab_size)
    tokens = next_tokens(logits, parameters, steps)    # (B, V), (B,) -> (B,)

choose       logits to the next token of each sequence; log-probabilities
parameters   the options of a batch as tensors
penalties    penalties on tokens that have occurred
randomness   random numbers as a function of seed, step and token
speculation  drafted tokens, accepted or rejected
"""

from clearhead.sampling.choose import (
    TokenLogprobs,
    check_finite,
    next_tokens,
    sampling_device,
    token_logprobs,
)
from clearhead.sampling.parameters import SamplingParameters
from clearhead.sampling.penalties import TokenCounts
from clearhead.sampling.speculation import Draft, accept_tokens, draw_draft, token_probabilities

__all__ = [
    "Draft",
    "SamplingParameters",
    "TokenCounts",
    "TokenLogprobs",
    "accept_tokens",
    "check_finite",
    "draw_draft",
    "next_tokens",
    "sampling_device",
    "token_logprobs",
    "token_probabilities",
]
