"""Speculative decoding: several tokens are guessed, then the network reads them all at once and keeps what it agrees to.

    for _ in decode_speculatively(network, row, PromptLookup()): print(row.tokens[-1])

    text          the cat sat on the
    draft                              mat and slept
    one call                     the   mat and slept      gives p after each
    kept                               mat and            p rejects "slept" and draws another: "then"

What comes out does not depend on the guesses, only how soon: greedy it is the text of `decode`, token for token; sampled
it has the same law (Leviathan et al. 2023; Chen et al. 2023). Reading a few tokens takes hardly longer than reading one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from clearhead.cache.cache import KeyValueCache
from clearhead.errors import ClearheadError
from clearhead.generation.decode import Batch, Row, check, prefill, room, run
from clearhead.generation.options import is_whole
from clearhead.generation.randomness import draw, splitmix, uniforms
from clearhead.generation.sampling import adjust, token_logprobs, truncate
from clearhead.model.transformer import Memory, Transformer

# Three independent draws belong to each step: the token itself has the seed's number `step`, as in `decode`; the guess
# and the verdict on it have a seed of their own each, made of a number before the first step.
GUESS, VERDICT = -1, -2


@dataclass(frozen=True)
class Draft:
    tokens: list[int]
    laws: Tensor | None = None  # (n, V), what each was drawn from; None: they were not drawn


class Drafter(Protocol):
    @property
    def num_tokens(self) -> int:
        """The most that it guesses at once."""

    def draft(self, row: Row, count: int) -> Draft:
        """At most `count` tokens that may follow those of the row."""


@dataclass
class Tally:
    num_calls: int = 0  # of the network, the one for the prompt included
    num_drafted: int = 0
    num_accepted: int = 0


@torch.inference_mode()
def decode_speculatively(
    network: Transformer,
    row: Row,
    drafter: Drafter,
    *,
    memory: Memory | None = None,
    chunk: int | None = None,
    tally: Tally | None = None,
) -> Iterator[None]:
    """One token more at each turn, as `decode` has it, though most turns need no call of the network."""
    check([row])
    tally = Tally() if tally is None else tally
    limit = min(row.options.max_new_tokens, room(network, len(row.prompt)))
    if limit == 0:
        return
    cache = KeyValueCache(network.config, slack=drafter.num_tokens)
    logits, draft = prefill(network, [list(row.prompt)], cache, memory, chunk), Draft([])
    while True:
        num_accepted, token = verify(network, row, draft, logits)
        cache.truncate(cache.length - len(draft.tokens) + num_accepted)
        tally.num_calls += 1
        tally.num_drafted += len(draft.tokens)
        tally.num_accepted += num_accepted
        for number, token in enumerate([*draft.tokens[:num_accepted], token]):
            row.take(token, limit)
            ...
