"""Clients that each send the next request as soon as their last one is finished, and when their tokens arrive.

load = Load(concurrency=2, num_requests=4); run = run_load(engine, load.prompts(vocab_size, seed="a"), 2, 64)

client 1    |--- first token ---|-|-|-|  |--- first token ---|-|-|-|
client 2    |--- first token ---|-|-|-|     |--- first token ---|-|-|-|
            sent                 between    sent
                                 tokens
"""

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from clearhead.benchmark.serving_engine import ServingEngine
from clearhead.errors import ClearheadError


@dataclass(frozen=True)
class Load:
    """What the clients of one measurement ask for."""

    concurrency: int  # clients
    num_requests: int  # of all clients together
    prompt_length: int = 64  # without the shared prefix
    num_tokens: int = 64  # new ones, of each request
    shared_prefix: int = 0  # tokens that all prompts of a round begin with

    @property
    def capacity(self) -> int:
        """Number of tokens of a request: its prompt and the new ones."""
        return self.shared_prefix + self.prompt_length + self.num_tokens

    def prompts(self, vocab_size: int, seed: str) -> list[list[int]]:
        """Return the prompts of one round: random ids, which no tokenizer has to know."""
        generator = random.Random(seed)
        prefix = generator.choices(range(vocab_size), k=self.shared_prefix)
        return [prefix + generator.choices(range(vocab_size), k=self.prompt_length) for _ in range(self.num_requests)]


@dataclass(frozen=True)
class LoadRun:
    """The times of one engine in one round."""

    seconds: float  # from the first request sent to the last token
    first_token_seconds: list[float]  # of each request, in the order of sending
    token_seconds: list[float]  # between two tokens of a request
    num_tokens: int  # new ones, of all requests

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all requests together."""
        return self.num_tokens / self.seconds


def run_load(engine: ServingEngine, prompts: Sequence[Sequence[int]], concurrency: int, num_tokens: int) -> LoadRun:
    """Send all prompts, at most `concurrency` at the same time, and return when each token arrived."""
    unsent = deque(enumerate(prompts))
    sent_at: dict[int, float] = {}

    def send_next() -> None:
        if unsent:
            number, prompt = unsent.popleft()
            sent_at[number] = time.perf_counter()
            engine.send(number, prompt, num_tokens)

    for _ in range(concurrency):
        send_next()
    num_unfinished = len(prompts)
    while num_unfinished:
        for _ in engine.wait():
            num_unfinished -= 1
            send_next()
    token_times = engine.take_token_times()
    for times in token_times.values():
        if len(times) != num_tokens:
            raise ClearheadError(f"{engine} generated {len(times)} tokens for a request instead of {num_tokens}")
    return LoadRun(
        seconds=max(times[-1] for times in token_times.values()) - sent_at[0],
        first_token_seconds=[token_times[number][0] - sent_at[number] for number in sent_at],
        token_seconds=[after - before for times in token_times.values() for before, after in pairwise(times)],
        num_tokens=num_tokens * len(prompts),
    )
