"""Checks of the loops that make tokens: each token must be the likeliest after those before it.

compared = greedy_alone(subject); compared.difference

What a loop made is read once, whole and without a cache. Two differences count: between the logit of a token as the
loop saw it and as it is read so, and how far that falls short of the largest there. If none does, the tokens are those
of decoding without a cache, since equal tokens up to one place give equal logits at it. A tie within the tolerance
passes; the detail says how many tokens are equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from clearhead.generation import Draft, Tally, TokenSequence, decode, decode_speculatively
from clearhead.verification.finding import Comparison, Pair, Skipped
from clearhead.verification.subject import Subject


def greedy_alone(subject: Subject) -> Comparison:
    need_decoder(subject)
    return likeliest(subject, [subject.continuation])


def greedy_batched(subject: Subject) -> Comparison:
    """Prompts of different lengths as one batch, that end one after another."""
    need_decoder(subject)
    numbers = range(len(subject.rows))
    rows = [subject.row(number, -(-subject.num_new // (number + 1))) for number in numbers]
    for _ in decode(subject.network, rows, encoder_output=subject.sources_of(numbers)):
        pass
    return likeliest(subject, rows)


def speculative(subject: Subject) -> Comparison:
    need_decoder(subject)
    row, tally = subject.row(0, subject.num_new), Tally()
    drafter = Rehearsed(subject.continuation.tokens, subject.config.vocab_size)
    for _ in decode_speculatively(subject.network, row, drafter, encoder_output=subject.sources_of([0]), tally=tally):
        pass
    compared = likeliest(subject, [row])
    guesses = f"{tally.num_accepted} of {tally.num_drafted} guesses stood"
    return Comparison(compared.pairs, f"{compared.detail}, {guesses}")


@dataclass(frozen=True)
class Rehearsed:
    """Guesses what greedy decoding is known to give, but for every third token: some guesses stand, some fall."""

    tokens: Sequence[int]
    vocab_size: int
    num_tokens: int = 4

    def draft(self, row: TokenSequence, count: int) -> Draft:
        start = len(row.tokens)
        known = enumerate(self.tokens[start : start + count], start)
        return Draft([(token + (place % 3 == 2)) % self.vocab_size for place, token in known])


def need_decoder(subject: Subject) -> None:
    if subject.config.decoder is None:
        raise Skipped("an encoder alone makes no tokens")


def likeliest(subject: Subject, rows: Sequence[TokenSequence]) -> Comparison:
    shortfalls: list[Pair] = []
    seen: list[Pair] = []
    for number, row in enumerate(rows):
        tokens = torch.tensor([[*row.prompt, *row.tokens]], device=subject.device)
        logits = subject.run(tokens[:, :-1], encoder_output=subject.encoder_output(number))[0, len(row.prompt) - 1 :]
        chosen = logits.gather(1, tokens[0, len(row.prompt) :, None])[:, 0]
        shortfalls.append((chosen, logits.amax(dim=1)))
        seen.append((torch.stack([step.chosen for step in row.logprobs]) + logits.logsumexp(dim=1), chosen))
    equal = torch.cat([chosen == largest for chosen, largest in shortfalls])
    comparable = subject.dtype != torch.float64  # a loop keeps log-probabilities in float32
    return Comparison(shortfalls + seen * comparable, f"{int(equal.sum())} of {len(equal)} tokens equal")
