"""Turn logits into tokens: options as tensors, penalties, filters, and reproducible random numbers.

    parameters = SamplingParameters.from_options([SamplingOptions(temperature=0.8, seed=1)], vocab_size)
    tokens = next_tokens(logits, parameters, steps)    # (B, V), (B,) -> (B,)

choose       logits to the next token of each sequence; log-probabilities
parameters   the options of a batch as tensors
penalties    penalties on tokens that have occurred
randomness   random numbers as a function of seed, step and token
"""

from clearhead.sampling.choose import (
    TokenLogprobs,
    adjust_logits,
    check_finite,
    filter_logits,
    next_tokens,
    sampling_device,
    token_logprobs,
)
from clearhead.sampling.parameters import SamplingParameters, check_vocabulary
from clearhead.sampling.penalties import TokenCounts
from clearhead.sampling.randomness import draw_tokens, splitmix, uniforms, wrap_int64

__all__ = [
    "SamplingParameters",
    "TokenCounts",
    "TokenLogprobs",
    "adjust_logits",
    "check_finite",
    "check_vocabulary",
    "draw_tokens",
    "filter_logits",
    "next_tokens",
    "sampling_device",
    "splitmix",
    "token_logprobs",
    "uniforms",
    "wrap_int64",
]
