"""Beam search: of all beginnings of a text the likeliest few are followed, not the single likeliest token.

    best = beam_search(network, [prompt_ids], BeamOptions(num_beams=4, stop_ids=[2]))[0][0]; best.tokens, best.score

At each step every beam is continued by every token. Of all these continuations, in order of log p(tokens | prompt),

    the first num_beams       if they end (a stop token, or no room for another) they are finished, others run on
    those after them          run on where finished ones left a place, until num_beams run

    score = log p / length^length_penalty     length: new tokens, a stop token included

The num_beams finished ones of the highest score are kept. The rules are those of transformers' `generate`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from clearhead.cache import KeyValueCache
from clearhead.errors import ClearheadError, unknown_name
from clearhead.generation.decode import TokenSequence, check, prefill, room, run
from clearhead.generation.sampling import check_numbers, choosing_device
from clearhead.model import EncoderOutput, Transformer
from clearhead.options import SamplingOptions, check_count, checked_ids, is_number

StopWhen = Literal["full", "unlikely", "impossible"]
STEEPEST = 10.0  # length penalty: length ** 10 is finite for any length


@dataclass(frozen=True, kw_only=True)
class BeamOptions:
    """When a search ends, once num_beams are finished, and the name transformers' `early_stopping` has for it:

    full         at once                                                                               True
    unlikely     the likeliest running beam, were it to end here, would not score above the worst      False
    impossible   nor would it at the length that suits it best if every token to come were certain     "never"
    """

    num_beams: int
    num_best: int = 1
    max_new_tokens: int = 128
    length_penalty: float = 1.0  # above 0 favours long texts, since log p is negative
    stop_when: StopWhen = "unlikely"
    stop_ids: Iterable[int] = ()  # kept as a tuple

    def __post_init__(self) -> None:
        for name in ("num_beams", "num_best", "max_new_tokens"):
            check_count(name, getattr(self, name))
        if self.num_best > self.num_beams:
            raise ClearheadError(f"num_best is {self.num_best}; it must not exceed num_beams, {self.num_beams}")
        if not is_number(self.length_penalty, -STEEPEST, STEEPEST):
            raise ClearheadError(f"length_penalty is {self.length_penalty!r}; it must be from -10 to 10")
        if self.stop_when not in get_args(StopWhen):
            raise unknown_name("stop_when", str(self.stop_when), get_args(StopWhen))
        object.__setattr__(self, "stop_ids", checked_ids(self.stop_ids, "stop_ids"))


class Beam(NamedTuple):
    """A finished text; the best first."""

    tokens: list[int]  # new ones, a stop token included
    score: float


class Hypothesis(NamedTuple):
    """A text that may go on."""

    tokens: tuple[int, ...]
    logprob: float  # of all of them
    row: int  # of the batch that read all but the last


class Search:
    """The beams of one prompt; no tensors."""

    def __init__(self, options: BeamOptions, limit: int, prompt: int):
        self.options, self.limit, self.prompt = options, limit, prompt
        self.running = [Hypothesis((), 0.0, prompt)]
        self.finished: list[Beam] = []

    def step(self, continuations: Iterable[Hypothesis]) -> None:
        num_beams = self.options.num_beams
        ordered = sorted(continuations, key=lambda one: one.logprob, reverse=True)
        ended = [Beam(list(one.tokens), self.score(one)) for one in ordered[:num_beams] if self.ends(one)]
        self.finished = sorted(self.finished + ended, key=lambda beam: beam.score, reverse=True)[:num_beams]
        self.running = [one for one in ordered if not self.ends(one)][:num_beams]

    def ends(self, one: Hypothesis) -> bool:
        return one.tokens[-1] in self.options.stop_ids or len(one.tokens) >= self.limit

    def score(self, one: Hypothesis, length: int | None = None) -> float:
        return one.logprob / (length or len(one.tokens)) ** self.options.length_penalty

    @property
    def done(self) -> bool:
        if not self.running:
            return True
        if len(self.finished) < self.options.num_beams:
            return False
        # log p only falls from here on, and is divided by the most at the limit if the penalty is positive.
        at_the_limit = self.options.stop_when == "impossible" and self.options.length_penalty > 0
        hope = self.score(self.running[0], self.limit if at_the_limit else None)
        return self.options.stop_when == "full" or hope <= self.finished[-1].score


@torch.inference_mode()
def beam_search(
    network: Transformer,
    prompts: Sequence[Sequence[int]],
    options: BeamOptions,
    encoder_output: EncoderOutput | None = None,
) -> list[list[Beam]]:
    """For each prompt its num_best beams, fewer only if there are not so many texts. `memory`: a source for each."""
    asked = SamplingOptions(max_new_tokens=options.max_new_tokens, stop_ids=options.stop_ids)
    check([TokenSequence(prompt, asked) for prompt in prompts], network)
    limits = [min(options.max_new_tokens, room(network, len(prompt))) for prompt in prompts]
    searches = [Search(options, limit, number) for number, limit in enumerate(limits)]
    if encoder_output is not None and encoder_output.cross_keys_values is None:
        encoder_output = network.precompute_cross_attention(encoder_output)
    cache, sources = KeyValueCache(network.config), encoder_output
    logits = prefill(network, [list(prompt) for prompt in prompts], cache, encoder_output)
    active, source_of = searches, list(range(len(prompts)))
    while True:
        extend(active, logits)
        active = [search for search in active if not search.done]
        if not active:
            return [search.finished[: options.num_best] for search in searches]
        beams = [beam for search in active for beam in search.running]
        rows = [beam.row for beam in beams]
        if len(rows) != len(logits):
            cache = cache.select(torch.tensor(rows, device=logits.device))
        elif rows != list(range(len(rows))):
            cache.reorder(torch.tensor(rows, device=logits.device))
        before, source_of = source_of, [search.prompt for search in active for _ in search.running]
        if sources is not None and source_of != before:
            encoder_output = sources.select(torch.tensor(source_of, device=logits.device))
        newest = torch.tensor([[beam.tokens[-1]] for beam in beams], device=logits.device)
        logits = run(network, newest, None, cache, encoder_output)


def extend(searches: Sequence[Search], logits: Tensor) -> None:
    """One step of every search; logits (B, V), a row for each of their beams in order."""
    options = searches[0].options
    beams = [beam for search in searches for beam in search.running]
    logits = logits.to(choosing_device(logits.device), torch.promote_types(logits.dtype, torch.float32))
    so_far = torch.tensor([beam.logprob for beam in beams], dtype=torch.float64, device=logits.device)
    # No more of one beam can matter: every end it has, and num_beams that go on.
    top = logits.topk(min(options.num_beams + len(set(options.stop_ids)), logits.shape[-1]), dim=-1)
    check_numbers(logits, top.indices[:, 0])
    largest = top.values[:, :1]
    logprobs = top.values.double() - largest - (logits - largest).exp_().sum(-1, True, dtype=torch.float64).log()
    places = zip(beams, top.indices.tolist(), (logprobs + so_far[:, None]).tolist(), strict=True)
    continuations = iter([continued(*place, row) for row, place in enumerate(places)])
    for search in searches:
        search.step(chain.from_iterable(islice(continuations, len(search.running))))


def continued(beam: Hypothesis, tokens: list[int], logprobs: list[float], row: int) -> list[Hypothesis]:
    possible = [(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True) if logprob > -math.inf]
    return [Hypothesis((*beam.tokens, token), logprob, row) for token, logprob in possible]
