"""Log-probabilities of prompts, computed while the prompts are read, a few rows of logits at a time.

score_prompts(items, hidden, network.compute_logits); logprobs = joined_scores(sequence)
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from clearhead.engine.scheduler import ScheduledTokens
from clearhead.engine.sequence import EngineSequence
from clearhead.sampling import TokenLogprobs, token_logprobs

_CHUNK = 64  # rows of logits that exist at a time: 50 MB with a vocabulary of 200,000 tokens


def score_prompts(items: Sequence[ScheduledTokens], hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
    """Add the log-probabilities of prompt tokens to the sequences that ask for them.

    hidden (T, D): the hidden states of the packed tokens of these items. The state of a token predicts the next one.
    """
    first_row = 0
    for item in items:
        sequence, offset = item.sequence, first_row - item.start
        for start in range(sequence.num_scored, min(item.stop, sequence.num_to_score), _CHUNK):
            stop = min(start + _CHUNK, item.stop, sequence.num_to_score)
            logits = logits_of(hidden[offset + start : offset + stop])
            targets = torch.tensor(sequence.request.prompt[start + 1 : stop + 1], device=logits.device)
            sequence.prompt_scores.append(token_logprobs(logits, targets, sequence.request.prompt_logprobs or 0))
            sequence.num_scored = stop
        first_row += item.stop - item.start


def joined_scores(sequence: EngineSequence) -> TokenLogprobs | None:
    """Return the log-probabilities of all tokens of a prompt after the first, on the CPU; None if not requested."""
    if sequence.request.prompt_logprobs is None:
        return None
    parts: list[TokenLogprobs] = sequence.prompt_scores
    if not parts:  # a prompt of one token
        return TokenLogprobs(torch.empty(0), torch.empty(0, 0), torch.empty(0, 0, dtype=torch.int64))
    return TokenLogprobs(
        torch.cat([part.chosen for part in parts]).cpu(),
        torch.cat([part.top for part in parts]).cpu(),
        torch.cat([part.top_ids for part in parts]).cpu(),
    )
