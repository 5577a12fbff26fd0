"""Engines against one clock: in every round each has its turn, and medians over the rounds are compared.

    results = measure(engines, subject, prompt_length=128, num_tokens=128, rounds=5)

    |------ first token ------|-- token --|-- token --| ...      one turn of one engine
     reads the prompt           decodes

Other work on the machine, or a processor that heats up, meets all of them alike.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from clearhead.benchmark.engine import Engine
from clearhead.benchmark.subject import Subject
from clearhead.benchmark.traffic import cache_read, read_bandwidth

WARM_TOKENS = 3
# OpenMP's threads spin for up to 0.2 s after work (Intel's KMP_BLOCKTIME), at the cost of whoever comes next.
PAUSE_SECONDS = 0.25

Tell = Callable[[str], object]  # what is going on; called once for each of num_steps


@dataclass(frozen=True)
class Turn:
    tokens: list[int]
    first_token_seconds: float
    token_seconds: list[float]  # of each after the first


@dataclass(frozen=True)
class Result:
    engine: str
    weights: str
    tokens_per_second: float | None  # None: no token after the first was asked for
    prefill_tokens_per_second: float
    first_token_seconds: float
    bandwidth_share: float | None  # of reading weights and cache once, in what decoding took
    bytes_per_token: int
    spread: float  # (slowest - fastest) / median of the rounds
    tokens_equal_to_ours: int | None  # up to the first that differs from ours in the same weights
    bandwidth_bytes_per_second: float  # of this machine in this run


@dataclass(frozen=True)
class Growth:
    """What a token costs after a text of `context` tokens, beside what its cache alone would add."""

    engine: str
    weights: str
    context: int
    seconds_per_token: float
    spread: float
    cache_bytes_per_token: int
    grown_seconds: float  # over the shortest context
    predicted_seconds: float  # cache bytes more than at the shortest, at the bandwidth measured


def measure(
    engines: Sequence[Engine],
    subject: Subject,
    prompt_length: int,
    num_tokens: int,
    rounds: int,
    tell: Tell = lambda what: None,
) -> list[Result]:
    """`num_tokens` 1: of reading the prompt alone."""
    turns, bandwidth = take_turns(engines, subject, [prompt_length], num_tokens, rounds, tell)
    ours = {engine.weights: turns[engine, prompt_length][0].tokens for engine in engines if engine.name == "clearhead"}
    return [
        result(engine, subject, prompt_length, turns[engine, prompt_length], bandwidth, ours.get(engine.weights))
        for engine in engines
    ]


def measure_growth(
    engines: Sequence[Engine],
    subject: Subject,
    contexts: Sequence[int],
    num_tokens: int,
    rounds: int,
    tell: Tell = lambda what: None,
) -> list[Growth]:
    turns, bandwidth = take_turns(engines, subject, contexts, num_tokens, rounds, tell)
    return [
        row for engine in engines for row in growth(engine, subject, {c: turns[engine, c] for c in contexts}, bandwidth)
    ]


def num_steps(engines: Sequence[Engine], num_lengths: int, rounds: int) -> int:
    """How often `tell` is called."""
    return len(engines) * (1 + num_lengths * rounds)


# --- turns


def take_turns(
    engines: Sequence[Engine], subject: Subject, lengths: Sequence[int], num_tokens: int, rounds: int, tell: Tell
) -> tuple[dict[tuple[Engine, int], list[Turn]], float]:
    """Every turn by engine and prompt length, and the best bandwidth seen before and between them."""
    prompts = {length: subject.prompt(length) for length in lengths}
    for engine in engines:
        tell(f"{engine} warms up")
        take_turn(engine, prompts[lengths[0]], min(num_tokens, WARM_TOKENS))
    turns: dict[tuple[Engine, int], list[Turn]] = {(engine, length): [] for engine in engines for length in lengths}
    bandwidth = 0.0
    for number in range(rounds):
        time.sleep(PAUSE_SECONDS)
        bandwidth = max(bandwidth, read_bandwidth(subject.device))
        for length in lengths:
            for engine in rotated(engines, number):
                tell(f"round {number + 1} of {rounds}: {engine}")
                time.sleep(PAUSE_SECONDS)
                turns[engine, length].append(take_turn(engine, prompts[length], num_tokens))
    return turns, bandwidth


def rotated(engines: Sequence[Engine], number: int) -> Iterator[Engine]:
    """Each round begins with another, so that none always comes after the same."""
    for place in range(len(engines)):
        yield engines[(place + number) % len(engines)]


def take_turn(engine: Engine, prompt: Sequence[int], num_tokens: int) -> Turn:
    tokens, stamps = [], []

    def hear(token: int) -> None:
        stamps.append(time.perf_counter())
        tokens.append(token)

    start = time.perf_counter()
    engine.speak(prompt, num_tokens, hear)
    assert len(tokens) == num_tokens, f"{engine} said {len(tokens)} tokens of {num_tokens}"
    return Turn(tokens, stamps[0] - start, [after - before for before, after in pairwise(stamps)])


# --- what they say


def result(
    engine: Engine,
    subject: Subject,
    prompt_length: int,
    turns: Sequence[Turn],
    bandwidth: float,
    ours: Sequence[int] | None,
) -> Result:
    first = statistics.median(turn.first_token_seconds for turn in turns)
    decodes = bool(turns[0].token_seconds)
    taken = [statistics.fmean(turn.token_seconds) if decodes else turn.first_token_seconds for turn in turns]
    seconds = statistics.median(taken)
    num_bytes = engine.weight_bytes + cache_of(engine, subject, prompt_length + len(turns[0].tokens) // 2)
    compared = None if ours is None or engine.name == "clearhead" else num_equal(turns[0].tokens, ours)
    return Result(
        engine=engine.name,
        weights=engine.weights,
        tokens_per_second=1 / seconds if decodes else None,
        prefill_tokens_per_second=prompt_length / first,
        first_token_seconds=first,
        bandwidth_share=num_bytes / seconds / bandwidth if decodes else None,
        bytes_per_token=num_bytes,
        spread=spread(taken),
        tokens_equal_to_ours=compared,
        bandwidth_bytes_per_second=bandwidth,
    )


def growth(engine: Engine, subject: Subject, turns: dict[int, list[Turn]], bandwidth: float) -> Iterator[Growth]:
    shortest = min(turns)
    # Each interval counts, and the median of them: few tokens at a long context are enough.
    seconds = {c: statistics.median(s for turn in turns[c] for s in turn.token_seconds) for c in turns}
    num_bytes = {c: cache_of(engine, subject, c + len(turns[c][0].tokens) // 2) for c in turns}
    for context in sorted(turns):
        yield Growth(
            engine=engine.name,
            weights=engine.weights,
            context=context,
            seconds_per_token=seconds[context],
            spread=spread([statistics.median(turn.token_seconds) for turn in turns[context]]),
            cache_bytes_per_token=num_bytes[context],
            grown_seconds=seconds[context] - seconds[shortest],
            predicted_seconds=(num_bytes[context] - num_bytes[shortest]) / bandwidth,
        )


def cache_of(engine: Engine, subject: Subject, length: int) -> int:
    return cache_read(subject.model.config, length, engine.cache_element_bytes)


def spread(seconds: Sequence[float]) -> float:
    return (max(seconds) - min(seconds)) / statistics.median(seconds)


def num_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Up to the first that differs: what follows continues another text."""
    pairs = zip(tokens, others, strict=True)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), len(tokens))
