"""Speculative decoding: several tokens are guessed, the network reads them all in one call and keeps what it would say.

    for _ in decode_speculatively(network, row, PromptLookup()): print(row.tokens[-1])

    text so far    the cat sat on the
    draft                                mat and slept
    one call                      the    mat and slept     p after each of them
    new tokens                           mat and purred    p(slept) was too small, another token was drawn

The guesses change how soon a token comes, never which: greedy, the text is that of `decode`; sampled, it has the same
law (Leviathan et al. 2023, Chen et al. 2023). It pays because reading a few tokens takes hardly longer than one: the
weights are fetched from memory once for all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from clearhead.architecture import ModelConfig
from clearhead.cache import KeyValueCache
from clearhead.errors import ClearheadError
from clearhead.generation.decode import Batch, TokenSequence, check, prefill, room, run
from clearhead.generation.prompts import encode_sources
from clearhead.generation.randomness import draw, splitmix, uniforms
from clearhead.generation.sampling import adjust, check_numbers, token_logprobs, truncate
from clearhead.model import EncoderOutput, Transformer
from clearhead.options import check_count

# Three draws belong to a step and must not depend on each other. The token itself has number `step` of the row's seed,
# as in `decode`; the guess and the verdict on it take theirs from seeds made of numbers that no step has.
GUESS, VERDICT = -1, -2


@dataclass(frozen=True)
class Draft:
    tokens: list[int]
    laws: Tensor | None = None  # (n, V), which each was drawn from; None: no other was possible


@runtime_checkable
class Drafter(Protocol):
    @property
    def num_tokens(self) -> int:
        """The most it guesses at once."""

    def draft(self, row: TokenSequence, count: int) -> Draft:
        """At most `count` tokens that may come next."""


@dataclass
class Tally:
    num_calls: int = 0  # of the network; the prompt is one
    num_drafted: int = 0
    num_accepted: int = 0


# --- the loop


@torch.inference_mode()
def decode_speculatively(
    network: Transformer,
    row: TokenSequence,
    drafter: Drafter,
    *,
    encoder_output: EncoderOutput | None = None,
    tally: Tally | None = None,
) -> Iterator[None]:
    """One token more at each turn; `memory` as for `decode`, `tally` is kept up to date.

    Rope with dynamic scaling turns by the length at hand, guesses included: there alone a text may come out otherwise.
    """
    check([row], network)
    check_speculation(network, drafter)
    limit = min(row.options.max_new_tokens, room(network, len(row.prompt)))
    if limit == 0:
        return
    tally = tally or Tally()
    cache = KeyValueCache(network.config, slack=drafter.num_tokens)
    draft, logits = Draft([]), prefill(network, [list(row.prompt)], cache, encoder_output)
    while True:
        tokens = verify(network, row, draft, logits)
        cache.truncate(cache.length - len(draft.tokens) + len(tokens) - 1)
        tally.num_calls += 1
        tally.num_drafted += len(draft.tokens)
        tally.num_accepted += len(tokens) - 1
        for token, seen in zip(tokens, logits, strict=False):
            if row.options.logprobs is not None:
                chosen = torch.tensor(token, device=seen.device)
                row.logprobs.append(token_logprobs(seen, chosen, row.options.logprobs))
            row.take(token, limit)
            yield
            if row.done:
                return
        # The call gives one token more than it confirms.
        draft = drafter.draft(row, min(drafter.num_tokens, limit - len(row.tokens) - 1))
        logits = read(network, [row.tokens[-1], *draft.tokens], cache, encoder_output)


def read(network: Transformer, tokens: list[int], cache: KeyValueCache, encoder_output: EncoderOutput | None) -> Tensor:
    """Logits after each token (n, V); the cache moves on."""
    given = torch.tensor([tokens], device=network.device)
    hidden = network.hidden_states(given, encoder_output=encoder_output, cache=cache, absorb=True)
    cache.advance()
    return network.to_logits(hidden[0])


def verify(network: Transformer, row: TokenSequence, draft: Draft, logits: Tensor) -> list[int]:
    """The guesses that stand, and one token more; logits (n + 1, V).

    A guess x drawn from q stands with probability min(1, p(x) / q(x)). In place of the first that falls a token is
    drawn from max(0, p - q), normalised: x or not, its law is p (Leviathan et al. 2023, appendix A.1). If none falls,
    the token after them is drawn from p, which is the same with q = 0.
    """
    check_numbers(logits, logits.argmax(dim=-1))
    count = len(draft.tokens)
    batch = Batch.of(network, [replace(row, tokens=[*row.tokens, *draft.tokens[:n]]) for n in range(count + 1)])
    p = law(logits, batch)
    guesses = torch.tensor(draft.tokens, dtype=torch.int64, device=p.device)
    q = one_hot(guesses, p.shape[1]).double() if draft.laws is None else draft.laws.to(p.device)
    q = torch.cat((q, torch.zeros_like(p[:1])))
    chance = uniforms(seeds_of(VERDICT, batch), batch.steps, 1)[:count, 0]
    stands = chance * q[range(count), guesses] < p[range(count), guesses]
    num_accepted = int(stands.long().cumprod(dim=0).sum())
    rest = (p - q)[num_accepted].clamp(min=0)
    token = draw(rest.log()[None], batch.options.seeds[:1], batch.steps[num_accepted, None])
    return [*draft.tokens[:num_accepted], int(token)]


def law(logits: Tensor, batch: Batch) -> Tensor:
    """The probabilities that `next_tokens` draws from (B, V), in float64; greedy, the likeliest token has them all."""
    logits = adjust(logits.to(batch.steps.device).float(), batch.options, batch.steps, batch.counts)
    if batch.options.all_greedy:
        return one_hot(logits.argmax(dim=-1), logits.shape[-1]).double()
    return truncate(logits, batch.options).double().softmax(dim=-1)


def seeds_of(purpose: int, batch: Batch) -> Tensor:
    return splitmix(batch.options.seeds, torch.full_like(batch.options.seeds, purpose))


# --- who guesses


@dataclass(frozen=True)
class PromptLookup:
    """The text repeats itself: what followed when its last tokens, up to `ngram` of them, last occurred.

    Good for summaries, edits and code; it costs next to nothing (Saxena 2023, "Prompt Lookup Decoding").
    """

    num_tokens: int = 10
    ngram: int = 3

    def __post_init__(self) -> None:
        check_count("num_tokens", self.num_tokens)
        check_count("ngram", self.ngram)

    def draft(self, row: TokenSequence, count: int) -> Draft:
        text = [*row.prompt, *row.tokens]
        for size in range(self.ngram, 0, -1):
            period = last_period(text, size)
            if period is not None:  # as in LZ77, the copy may run on into itself
                return Draft([text[n % period - period] for n in range(count)])
        return Draft([])


def last_period(text: list[int], size: int) -> int | None:
    """How many tokens before its end the last `size` tokens occurred most recently."""
    for start in range(len(text) - size - 1, -1, -1):
        if text[start : start + size] == text[-size:]:
            return len(text) - size - start
    return None


class DraftModel:
    """A smaller network of the same vocabulary, under the same options. It keeps its own cache between guesses."""

    def __init__(self, network: Transformer, num_tokens: int = 4, encoder_output: EncoderOutput | None = None):
        check_count("num_tokens", num_tokens)
        self.network, self.num_tokens, self.encoder_output = network, num_tokens, encoder_output
        self.forget()

    def forget(self) -> None:
        self.cache = KeyValueCache(self.network.config, slack=self.num_tokens)
        self.held: list[int] = []  # the tokens in the cache

    def draft(self, row: TokenSequence, count: int) -> Draft:
        tokens: list[int] = []
        laws: list[Tensor] = []
        for _ in range(min(count, room(self.network, len(row.prompt)) - len(row.tokens))):
            ahead = replace(row, tokens=[*row.tokens, *tokens])
            batch = Batch.of(self.network, [ahead])
            laws.append(law(self.read([*row.prompt, *ahead.tokens]), batch))
            tokens.append(int(draw(laws[-1].log(), seeds_of(GUESS, batch), batch.steps)))
        return Draft(tokens, torch.cat(laws) if laws else None)

    def read(self, text: list[int]) -> Tensor:
        """Logits after the text (1, V); only what has changed since the last time goes through the network."""
        pairs = enumerate(zip(self.held, text[:-1], strict=False))
        same = next((n for n, (old, new) in pairs if old != new), min(len(self.held), len(text) - 1))
        if len(self.held) - same > self.num_tokens:  # not the text of the last guess
            self.forget()
            same = 0
        self.cache.truncate(same)
        self.held = text[:same]
        new = torch.tensor([text[same:]], device=self.network.device)
        logits = run(self.network, new, None, self.cache, self.encoder_output)
        self.held = text
        return logits


Speculation = Literal["lookup"] | Transformer | Drafter


def drafter_for(speculation: Speculation, row: TokenSequence) -> Drafter:
    """Who guesses for a row: by its name, or a smaller network, which reads the row's source for itself."""
    if isinstance(speculation, str):
        return PromptLookup()
    if not isinstance(speculation, Transformer):
        return speculation
    return DraftModel(speculation, encoder_output=encode_sources(speculation, [row.source]) if row.source else None)


# --- refused


def check_speculation(network: Transformer, speculation: object) -> None:
    if isinstance(speculation, DraftModel):
        speculation = speculation.network
    if isinstance(speculation, Transformer):
        check_draft(speculation.config, network.config)
    elif speculation != "lookup" and not isinstance(speculation, Drafter):
        given = repr(speculation) if isinstance(speculation, str) else f"a {type(speculation).__name__}"
        raise ClearheadError(f"speculate is {given}; it must be 'lookup' or a draft model")


def check_draft(draft: ModelConfig, config: ModelConfig) -> None:
    if draft.vocab_size != config.vocab_size:
        raise ClearheadError(
            f"the draft model has {draft.vocab_size} tokens and the network {config.vocab_size}; "
            "take one that was trained with the same vocabulary"
        )
    if draft.decoder is None or draft.is_encoder_decoder != config.is_encoder_decoder:
        raise ClearheadError(
            "the draft model is of another kind; it must have an encoder where this one has, and a decoder"
        )
