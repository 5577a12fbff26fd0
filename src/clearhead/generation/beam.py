"""Beam search: extend the few most likely texts in parallel, instead of a single one token by token.

    best = beam_search(network, [prompt_ids], BeamOptions(num_beams=4, stop_ids=[2]))[0][0]; best.tokens, best.score

Each step continues every beam with every token. Among all continuations, sorted by log p(tokens | prompt),

    the first num_beams       finish if they end (a stop token, or the maximum length), and otherwise continue
    those after them          continue in place of finished ones, until num_beams beams are running

    score = log p / length^length_penalty     length: number of new tokens, a stop token included

The num_beams finished beams with the highest scores are kept. These are the rules of transformers' `generate`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.architecture import remaining_positions
from clearhead.cache import KeyValueCache, forward_step
from clearhead.generation.decoding import prefill, read_again, rotation_limits
from clearhead.generation.sequences import TokenSequence, check_sequences
from clearhead.model import EncoderOutput, Transformer
from clearhead.options import BeamOptions, SamplingOptions
from clearhead.sampling import check_finite, sampling_device


class Beam(NamedTuple):
    """A finished text."""

    tokens: list[int]  # new tokens, a stop token included
    score: float


@dataclass(frozen=True, kw_only=True)
class BeamRules:
    """What all beams must or must not contain, whatever the options of a search are."""

    last_token: int | None = None  # ends a beam of the maximum length, at no cost
    suppressed: tuple[int, ...] = ()  # tokens that no beam contains
    num_forced: int = 0  # tokens at the end of the prompts that count as generated
    # changes the logits (B, V) of running beams, given the new tokens of each; -∞ excludes a continuation
    adjust: Callable[[Tensor, Sequence[Sequence[int]]], Tensor] | None = None


NO_RULES = BeamRules()


class Hypothesis(NamedTuple):
    """A running beam, which may continue."""

    tokens: tuple[int, ...]
    logprob: float  # sum over all its tokens
    row: int  # batch row whose cache holds all of its tokens but the last


class Search:
    """The running and finished beams of one prompt. It uses no tensors."""

    def __init__(self, options: BeamOptions, max_tokens: int, prompt: int, rules: BeamRules = NO_RULES):
        self.options = options
        self.rules = rules
        self.max_tokens = max_tokens
        self.prompt = prompt
        self.running = [Hypothesis((), 0.0, prompt)]
        self.finished: list[Beam] = []

    def step(self, continuations: Iterable[Hypothesis]) -> None:
        """Choose the beams that finish and those that continue."""
        num_beams, continuations = self.options.num_beams, list(continuations)  # consumed even if it is not used
        if self.rules.last_token is not None and len(self.running[0].tokens) + 1 == self.max_tokens:
            continuations = [
                Hypothesis((*beam.tokens, self.rules.last_token), beam.logprob, beam.row) for beam in self.running
            ]
        ordered = sorted(continuations, key=lambda beam: beam.logprob, reverse=True)
        ended = [Beam(list(beam.tokens), self.score(beam)) for beam in ordered[:num_beams] if self.ends(beam)]
        self.finished = sorted(self.finished + ended, key=lambda beam: beam.score, reverse=True)[:num_beams]
        self.running = [beam for beam in ordered if not self.ends(beam)][:num_beams]

    def ends(self, beam: Hypothesis) -> bool:
        """Return whether a beam ends with a stop token or has the maximum length."""
        return beam.tokens[-1] in self.options.stop_ids or len(beam.tokens) >= self.max_tokens

    def score(self, beam: Hypothesis, length: int | None = None) -> float:
        """Return log p / length ** length_penalty; without `length`, for the beam's own length."""
        length = (length or len(beam.tokens)) + self.rules.num_forced
        return beam.logprob / length**self.options.length_penalty

    @property
    def is_done(self) -> bool:
        """Whether the search ends here, by the rule `stop_when` of its options."""
        if not self.running:
            return True
        if len(self.finished) < self.options.num_beams:
            return False
        # log p can only decrease from here on. With a positive penalty its divisor is largest at the maximum length.
        at_max_length = self.options.stop_when == "impossible" and self.options.length_penalty > 0
        best_score = self.score(self.running[0], self.max_tokens if at_max_length else None)
        return self.options.stop_when == "full" or best_score <= self.finished[-1].score


@torch.inference_mode()
def beam_search(
    network: Transformer,
    prompts: Sequence[Sequence[int]],
    options: BeamOptions,
    encoder_output: EncoderOutput | None = None,
    rules: BeamRules = NO_RULES,
) -> list[list[Beam]]:
    """Return the num_best beams of each prompt, the best first; fewer only if there are not that many texts.

    encoder_output: one source per prompt, for an encoder-decoder.
    """
    limits = SamplingOptions(max_new_tokens=options.max_new_tokens, stop_ids=options.stop_ids)
    check_sequences([TokenSequence(prompt, limits) for prompt in prompts], network)
    searches = [
        Search(
            options,
            min(options.max_new_tokens, remaining_positions(network.config.output_stack, len(prompt))),
            index,
            rules,
        )
        for index, prompt in enumerate(prompts)
    ]
    if encoder_output is not None and encoder_output.cross_keys_values is None:
        encoder_output = network.precompute_cross_attention(encoder_output)
    cache = KeyValueCache(network.config)
    sources, read_again_after = encoder_output, rotation_limits(network.config.output_stack)
    logits = prefill(network, [list(prompt) for prompt in prompts], cache, encoder_output)
    active = searches
    source_of_row = list(range(len(prompts)))
    while True:
        _extend_beams(active, logits)
        active = [search for search in active if not search.is_done]
        if not active:
            return [search.finished[: options.num_best] for search in searches]
        beams = [beam for search in active for beam in search.running]
        rows = [beam.row for beam in beams]
        if len(rows) != len(logits):
            cache = cache.select(torch.tensor(rows, device=logits.device))
        elif rows != list(range(len(rows))):
            cache.reorder(torch.tensor(rows, device=logits.device))
        previous = source_of_row
        source_of_row = [search.prompt for search in active for _ in search.running]
        if sources is not None and source_of_row != previous:
            encoder_output = sources.select(torch.tensor(source_of_row, device=logits.device))
        sources_and_beams = list(zip(source_of_row, beams, strict=True))
        if any(len(prompts[source]) + len(beam.tokens) - 1 in read_again_after for source, beam in sources_and_beams):
            texts = [[*prompts[source], *beam.tokens] for source, beam in sources_and_beams]
            logits = read_again(network, texts, cache, encoder_output)
        else:
            newest = torch.tensor([[beam.tokens[-1]] for beam in beams], device=logits.device)
            logits = forward_step(network, newest, cache, encoder_output=encoder_output)


def _extend_beams(searches: Sequence[Search], logits: Tensor) -> None:
    """Run one step of every search; logits (B, V) have one row per running beam, in order."""
    options = searches[0].options
    beams = [beam for search in searches for beam in search.running]
    logits = logits.to(sampling_device(logits.device), torch.promote_types(logits.dtype, torch.float32))
    beam_logprobs = torch.tensor([beam.logprob for beam in beams], dtype=torch.float64, device=logits.device)
    # Only this many continuations of one beam can matter: all its stop tokens, and num_beams that continue.
    num_top = min(options.num_beams + len(set(options.stop_ids)), logits.shape[-1])
    largest = logits.amax(dim=-1, keepdim=True)
    allowed, rules = logits, searches[0].rules
    if rules.suppressed:  # the probabilities of the other tokens stay as they are
        allowed = logits.clone()
        allowed[:, list(rules.suppressed)] = -math.inf
    if rules.adjust is not None:
        allowed = rules.adjust(allowed, [beam.tokens for beam in beams])
    top = allowed.topk(num_top, dim=-1)
    check_finite(logits, top.indices[:, 0])
    logprobs = top.values.double() - largest - (logits - largest).exp_().sum(-1, True, dtype=torch.float64).log()
    by_beam = zip(beams, top.indices.tolist(), (logprobs + beam_logprobs[:, None]).tolist(), strict=True)
    continuations = iter([_continue_beam(*each, row) for row, each in enumerate(by_beam)])
    for search in searches:
        search.step(chain.from_iterable(islice(continuations, len(search.running))))


def _continue_beam(beam: Hypothesis, tokens: list[int], logprobs: list[float], row: int) -> list[Hypothesis]:
    """Return the continuations of a beam by these tokens, except impossible ones."""
    possible = [(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True) if logprob > -math.inf]
    return [Hypothesis((*beam.tokens, token), logprob, row) for token, logprob in possible]
