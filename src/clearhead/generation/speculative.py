"""Speculative decoding: draft several tokens, let the network read them in one call, keep those it agrees with.

    for _ in decode_speculatively(network, sequence, PromptLookup()): print(sequence.tokens[-1])

    text so far    the cat sat on the
    draft                                mat and slept
    one call                      the    mat and slept     p after each of them
    new tokens                           mat and purred    p(slept) was too small, another token was drawn

Drafts change the speed, never the result: greedy decoding gives the text of `decode`, and sampling has the same
distribution (Leviathan et al. 2023, Chen et al. 2023). It is faster because reading a few tokens takes hardly longer
than reading one: the weights are fetched from memory once for all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from clearhead.architecture import ModelConfig, remaining_positions
from clearhead.cache import KeyValueCache, forward_hidden, forward_step
from clearhead.errors import ClearheadError
from clearhead.generation.decoding import BatchSampler, prefill, rotation_depends_on_length
from clearhead.generation.prompts import encode_sources
from clearhead.generation.sequences import TokenSequence, check_sequences
from clearhead.model import EncoderOutput, Transformer
from clearhead.options import check_positive_integer
from clearhead.sampling import Draft as Draft
from clearhead.sampling import accept_tokens, check_finite, draw_draft, token_logprobs, token_probabilities


@runtime_checkable
class Drafter(Protocol):
    """Anything that can propose the next tokens of a sequence."""

    @property
    def num_tokens(self) -> int:
        """The maximum number of tokens in a draft."""

    def draft(self, sequence: TokenSequence, count: int) -> Draft:
        """Return at most `count` tokens that may come next."""


Speculation = Literal["lookup"] | Transformer | Drafter


@dataclass
class SpeculationStats:
    """Counts of a speculative loop, updated after each call of the network."""

    num_calls: int = 0  # of the network, the prompt included
    num_drafted: int = 0
    num_accepted: int = 0


# --- the loop


def decode_speculatively(
    network: Transformer,
    sequence: TokenSequence,
    speculation: Speculation,
    *,
    encoder_output: EncoderOutput | None = None,
    stats: SpeculationStats | None = None,
) -> Iterator[None]:
    """Check the arguments and return an iterator that adds one token to the sequence per iteration.

    speculation: "lookup" for PromptLookup, a smaller network of the same vocabulary for DraftModel, or a drafter.
    encoder_output: as for `decode`. stats: counts to update.
    """
    check_sequences([sequence], network)
    check_speculation(network, speculation)
    return _speculative_steps(network, sequence, speculation, encoder_output, stats or SpeculationStats())


@torch.inference_mode()
def _speculative_steps(
    network: Transformer,
    sequence: TokenSequence,
    speculation: Speculation,
    encoder_output: EncoderOutput | None,
    stats: SpeculationStats,
) -> Iterator[None]:
    max_tokens = min(
        sequence.options.max_new_tokens, remaining_positions(network.config.output_stack, len(sequence.prompt))
    )
    if max_tokens == 0:
        return
    if encoder_output is None and sequence.source:
        encoder_output = encode_sources(network, [sequence.source])
    drafter = make_drafter(speculation, sequence)
    cache = KeyValueCache(network.config, slack=drafter.num_tokens)
    draft = Draft([])
    logits = prefill(network, [list(sequence.prompt)], cache, encoder_output)
    while True:
        tokens = accept_draft(network, sequence, draft, logits)
        cache.truncate(cache.length - len(draft.tokens) + len(tokens) - 1)
        stats.num_calls += 1
        stats.num_drafted += len(draft.tokens)
        stats.num_accepted += len(tokens) - 1
        for token, token_logits in zip(tokens, logits, strict=False):
            if sequence.options.logprobs is not None:
                chosen = torch.tensor(token, device=token_logits.device)
                sequence.logprobs.append(token_logprobs(token_logits, chosen, sequence.options.logprobs))
            sequence.append(token, max_tokens)
            yield
            if sequence.finished:
                return
        # A call gives one token more than it accepts, so the draft leaves room for it.
        draft = drafter.draft(sequence, min(drafter.num_tokens, max_tokens - len(sequence.tokens) - 1))
        new = torch.tensor([[sequence.tokens[-1], *draft.tokens]], device=network.device)
        hidden = forward_hidden(network, new, cache, encoder_output=encoder_output, absorb=True)
        logits = network.compute_logits(hidden[0])  # (n + 1, V)


def accept_draft(network: Transformer, sequence: TokenSequence, draft: Draft, logits: Tensor) -> list[int]:
    """Return the accepted tokens of a draft and one more token; logits (n + 1, V)."""
    check_finite(logits, logits.argmax(dim=-1))
    prefixes = [replace(sequence, tokens=[*sequence.tokens, *draft.tokens[:n]]) for n in range(len(draft.tokens) + 1)]
    sampler = BatchSampler.create(network, prefixes)
    return accept_tokens(logits, draft, sampler.parameters, sampler.steps, sampler.counts)


# --- drafters


@dataclass(frozen=True)
class PromptLookup:
    """Draft what followed when the last tokens, up to `ngram` of them, occurred before.

    It costs next to nothing and works well for summaries, edits and code (Saxena 2023, "Prompt Lookup Decoding").
    """

    num_tokens: int = 10
    ngram: int = 3

    def __post_init__(self) -> None:
        check_positive_integer("num_tokens", self.num_tokens)
        check_positive_integer("ngram", self.ngram)

    def draft(self, sequence: TokenSequence, count: int) -> Draft:
        """Return the tokens that followed the most recent occurrence of the longest matching n-gram."""
        text = [*sequence.prompt, *sequence.tokens]
        for size in range(self.ngram, 0, -1):
            period = _last_period(text, size)
            if period is not None:  # as in LZ77, the copy may overlap itself
                return Draft([text[n % period - period] for n in range(count)])
        return Draft([])


def _last_period(text: list[int], size: int) -> int | None:
    """Return the distance from the last `size` tokens back to their most recent earlier occurrence, or None."""
    for start in range(len(text) - size - 1, -1, -1):
        if text[start : start + size] == text[-size:]:
            return len(text) - size - start
    return None


class DraftModel:
    """Draft with a smaller network of the same vocabulary and the same options. It keeps its cache between drafts."""

    def __init__(self, network: Transformer, num_tokens: int = 4, encoder_output: EncoderOutput | None = None):
        check_positive_integer("num_tokens", num_tokens)
        self.network = network
        self.num_tokens = num_tokens
        self.encoder_output = encoder_output
        self.clear_cache()

    def clear_cache(self) -> None:
        """Forget all tokens."""
        self.cache = KeyValueCache(self.network.config, slack=self.num_tokens)
        self.cached_tokens: list[int] = []

    def draft(self, sequence: TokenSequence, count: int) -> Draft:
        """Sample up to `count` tokens, fewer if this network runs out of learned positions."""
        tokens: list[int] = []
        probabilities: list[Tensor] = []
        num_possible = remaining_positions(self.network.config.output_stack, len(sequence.prompt)) - len(
            sequence.tokens
        )
        for _ in range(min(count, num_possible)):
            extended = replace(sequence, tokens=[*sequence.tokens, *tokens])
            sampler = BatchSampler.create(self.network, [extended])
            logits = self.next_logits([*sequence.prompt, *extended.tokens])
            probabilities.append(token_probabilities(logits, sampler.parameters, sampler.steps, sampler.counts))
            tokens.append(draw_draft(probabilities[-1], sampler.parameters, sampler.steps))
        return Draft(tokens, torch.cat(probabilities) if probabilities else None)

    def next_logits(self, text: list[int]) -> Tensor:
        """Return the logits after the text (1, V). The network reads only tokens that the cache does not contain."""
        pairs = enumerate(zip(self.cached_tokens, text[:-1], strict=False))
        max_shared = min(len(self.cached_tokens), len(text) - 1)
        num_shared = next((n for n, (old, new) in pairs if old != new), max_shared)
        if len(self.cached_tokens) - num_shared > self.num_tokens:  # not a continuation of the last text
            self.clear_cache()
            num_shared = 0
        self.cache.truncate(num_shared)
        self.cached_tokens = text[:num_shared]
        new_tokens = torch.tensor([text[num_shared:]], device=self.network.device)
        logits = forward_step(self.network, new_tokens, self.cache, encoder_output=self.encoder_output)
        self.cached_tokens = text
        return logits


def make_drafter(speculation: Speculation, sequence: TokenSequence) -> Drafter:
    """Return the drafter for a sequence. A draft network encodes the source of the sequence itself."""
    if isinstance(speculation, str):
        return PromptLookup()
    if not isinstance(speculation, Transformer):
        return speculation
    source = sequence.source
    return DraftModel(speculation, encoder_output=encode_sources(speculation, [source]) if source else None)


# --- checks


def check_speculation(network: Transformer, speculation: object) -> None:
    """Raise ClearheadError unless `speculation` is "lookup", a drafter, or a draft network that fits this network."""
    if network.config.decoder is not None and rotation_depends_on_length(network.config.decoder):
        raise ClearheadError(
            "with dynamic scaling or LongRoPE, rotations depend on the length of the text including drafts, so "
            "speculation would change the text; generate without it"
        )
    if isinstance(speculation, DraftModel):
        speculation = speculation.network
    if isinstance(speculation, Transformer):
        _check_draft_config(speculation.config, network.config)
    elif speculation != "lookup" and not isinstance(speculation, Drafter):
        value = repr(speculation) if isinstance(speculation, str) else f"a {type(speculation).__name__}"
        raise ClearheadError(f"speculate is {value}; it must be 'lookup' or a draft model")


def _check_draft_config(draft: ModelConfig, config: ModelConfig) -> None:
    if draft.vocab_size != config.vocab_size:
        raise ClearheadError(
            f"the draft model has a vocabulary of {draft.vocab_size} tokens, but this model has one of "
            f"{config.vocab_size}; use a draft model with the same vocabulary"
        )
    if draft.decoder is None or draft.is_encoder_decoder != config.is_encoder_decoder:
        raise ClearheadError(
            "the draft model is of another kind; it must have a decoder, and an encoder only if this model has one"
        )
