"""Checks of the loops that make tokens: each token must be the likeliest after those before it.

compared = greedy_alone(subject); compared.difference

What a loop made is read once, whole and without a cache. The difference is how far the logit of a token it chose falls
short of the largest there: 0 if the tokens are equal to those of decoding without a cache, since equal tokens up to
one place give equal logits at it. A tie within the tolerance passes, and the detail says so.
"""

from collections.abc import Sequence

import torch

from clearhead.generation.decode import Row, decode
from clearhead.generation.options import SamplingOptions
from clearhead.model.transformer import Memory
from clearhead.verification.finding import Comparison, Skipped
from clearhead.verification.subject import Subject


def greedy_alone(subject: Subject) -> Comparison:
    return greedy(subject, [0], [subject.num_new])


def greedy_batched(subject: Subject) -> Comparison:
    """Prompts of different lengths as one batch, that end one after another."""
    numbers = range(len(subject.rows))
    return greedy(subject, numbers, [max(subject.num_new // (row + 1), 1) for row in numbers])


def greedy(subject: Subject, numbers: Sequence[int], num_new: Sequence[int]) -> Comparison:
    rows = [
        Row(prompt_of(subject, row), SamplingOptions(max_new_tokens=count))
        for row, count in zip(numbers, num_new, strict=True)
    ]
    for _ in decode(subject.network, rows, memory=sources(subject, numbers)):
        pass
    return likeliest(subject, numbers, rows)


def prompt_of(subject: Subject, row: int) -> list[int]:
    if subject.config.decoder is None:
        raise Skipped("an encoder alone makes no tokens")
    return subject.rows[row][:1] if subject.sources else subject.rows[row]


def sources(subject: Subject, numbers: Sequence[int]) -> Memory | None:
    return subject.model.read_sources([subject.sources[row] for row in numbers]) if subject.sources else None


def likeliest(subject: Subject, numbers: Sequence[int], rows: Sequence[Row]) -> Comparison:
    pairs, equal, made = [], 0, 0
    for number, row in zip(numbers, rows, strict=True):
        tokens = torch.tensor([[*row.prompt, *row.tokens]], device=subject.device)
        logits = subject.run(tokens[:, :-1], memory=subject.memory(number))[0, len(row.prompt) - 1 :]
        chosen = logits.gather(1, tokens[0, len(row.prompt) :, None])[:, 0]
        pairs.append((chosen, logits.amax(dim=1)))
        equal, made = equal + int((chosen == pairs[-1][1]).sum()), made + len(row.tokens)
    return Comparison(pairs, f"{equal} of {made} tokens equal")
