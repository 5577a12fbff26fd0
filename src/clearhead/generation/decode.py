"""Token by token, each chosen from the distribution the network gives: the readable loop, and the oracle of others.

    for token in decode(network, prompt_ids, Sampling(max_new_tokens=64), stop_ids): ...

The whole sequence goes through the network for every token: nothing is kept, so nothing can go stale (book E1).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Temperature 0 takes the likeliest token; above, one is drawn from softmax(logits / temperature)."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None  # None: another draw each time

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ClearheadError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not 0.0 <= self.temperature < float("inf"):
            raise ClearheadError(f"temperature is {self.temperature}; it must be 0 or more")


@torch.inference_mode()
def decode(
    network: Transformer, prompt: Sequence[int], sampling: Sampling, stop_ids: Collection[int] = ()
) -> Iterator[int]:
    """New tokens after `prompt`, up to and with the first stop token."""
    yield from continue_tokens(network, None, prompt, sampling, stop_ids)


@torch.inference_mode()
def translate(
    network: Transformer, source: Sequence[int], start: int, sampling: Sampling, stop_ids: Collection[int] = ()
) -> Iterator[int]:
    """Target tokens for `source`, after the token `start`: the source is encoded once."""
    yield from continue_tokens(network, source, [start], sampling, stop_ids)


def continue_tokens(
    network: Transformer,
    source: Sequence[int] | None,
    prompt: Sequence[int],
    sampling: Sampling,
    stop_ids: Collection[int],
) -> Iterator[int]:
    if not prompt:
        raise ClearheadError("the prompt is empty; give at least one token")
    device = next(network.parameters()).device
    memory = None if source is None else network.encode(torch.tensor([list(source)], device=device))
    generator = seeded(sampling.seed, device)
    tokens = torch.tensor([list(prompt)], device=device)  # (1, T)
    for _ in range(sampling.max_new_tokens):
        logits = network(tokens) if memory is None else network.decode(tokens, memory)
        token = choose(logits[0, -1], sampling.temperature, generator)
        yield token
        if token in stop_ids:
            return
        tokens = torch.cat((tokens, tokens.new_tensor([[token]])), dim=1)


def choose(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """logits (V,) -> one token."""
    if temperature == 0.0:
        return int(logits.argmax())
    probabilities = (logits.float() / temperature).softmax(dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def seeded(seed: int | None, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
