"""What a caller may ask of generation, checked at birth; no torch.

SamplingOptions(temperature=0.8, top_p=0.95, seed=7, stop=["\\n\\n"])
"""

import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from clearhead.errors import ClearheadError

SMALLEST, LARGEST = 1e-6, 1e9  # of a factor or summand: products and quotients with logits stay finite in float32


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The options of one sequence; None means off.

    Greedy decoding (temperature 0) takes the likeliest token, which top_k, top_p and min_p always keep. The repetition
    penalty looks at prompt and output (CTRL, Keskar et al. 2019, §4.1), the presence and frequency penalties at the
    output alone (OpenAI). Neither a stop token nor a stop string ends a text before `min_new_tokens`.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = ()  # kept as a tuple of pairs
    seed: int | None = None  # None: another draw each time
    stop: str | Iterable[str] = ()  # kept as a tuple
    stop_ids: Iterable[int] = ()  # kept as a tuple
    logprobs: int | None = None  # alternatives beside the chosen token; 0: its own log-probability alone

    def __post_init__(self) -> None:
        for name, (holds, words) in RULES.items():
            value = getattr(self, name)
            if not holds(value) and not (value is None and name in OPTIONAL):
                raise ClearheadError(f"{name} is {value!r}; it must be {words}")
        if self.min_new_tokens > self.max_new_tokens:
            raise ClearheadError(
                f"min_new_tokens is {self.min_new_tokens}; it must not exceed max_new_tokens, {self.max_new_tokens}"
            )
        object.__setattr__(self, "logit_bias", checked_bias(self.logit_bias))
        object.__setattr__(self, "stop", checked_stop(self.stop))
        object.__setattr__(self, "stop_ids", checked_ids(self.stop_ids, "stop_ids"))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def seeded(self) -> "SamplingOptions":
        """The same with a seed: its own, or a fresh one that no other sequence shares."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))


def check_effect(options: Mapping[str, Any], n: int = 1) -> None:
    """Unless a temperature is given nothing is drawn: a setting that is about drawing is refused then."""
    if options.get("temperature") is not None:
        return
    idle = next((name for name in DRAWING if options.get(name) is not None), None)
    if idle is not None:
        raise ClearheadError(
            f"{idle} has no effect at temperature 0, which takes the likeliest token; temperature 1 draws"
        )
    if n > 1:
        raise ClearheadError(f"n is {n}, but at temperature 0 all texts would be the same; temperature 1 draws")


def is_whole(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63


def is_number(value: object, least: float, most: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


RULES: dict[str, tuple[Callable[[object], bool], str]] = {
    "max_new_tokens": (is_whole, "a whole number, 0 or more"),
    "min_new_tokens": (is_whole, "a whole number, 0 or more"),
    "temperature": (
        lambda value: is_number(value, 0, 0) or is_number(value, SMALLEST, LARGEST),
        f"0 for the likeliest token, or from {SMALLEST:g} to {LARGEST:g}",
    ),
    "top_k": (lambda value: is_whole(value, least=1), "a whole number, 1 or more; left out, every token is kept"),
    "top_p": (lambda value: is_number(value, math.ulp(0), 1), "greater than 0 and at most 1"),
    "min_p": (lambda value: is_number(value, 0, 1), "from 0 to 1"),
    "repetition_penalty": (
        lambda value: is_number(value, SMALLEST, LARGEST),
        f"from {SMALLEST:g} to {LARGEST:g}; 1 is none",
    ),
    "presence_penalty": (lambda value: is_number(value, -LARGEST, LARGEST), f"from {-LARGEST:g} to {LARGEST:g}"),
    "frequency_penalty": (lambda value: is_number(value, -LARGEST, LARGEST), f"from {-LARGEST:g} to {LARGEST:g}"),
    "seed": (lambda value: is_whole(value, least=-(2**63)), "a whole number of 64 bits"),
    "logprobs": (is_whole, "a whole number, 0 or more"),
}
DRAWING = ("top_k", "top_p", "min_p", "seed")
OPTIONAL = {field.name for field in fields(SamplingOptions) if field.default is None}


def check_count(name: str, value: object) -> None:
    if not is_whole(value, least=1):
        raise ClearheadError(f"{name} is {value!r}; it must be a whole number, 1 or more")


def listed(values: Any, name: str) -> tuple[Any, ...]:
    if not isinstance(values, Iterable):
        raise ClearheadError(f"{name} is {values!r}; it must be a list")
    return tuple(values)


def checked_ids(ids: Iterable[int], name: str) -> tuple[int, ...]:
    kept = listed(ids, name)
    for token in kept:
        if not is_whole(token):
            raise ClearheadError(f"{name} has {token!r}; a token id is a whole number, 0 or more")
    return kept


def checked_bias(bias: Mapping[int, float] | Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    pairs = listed(bias.items() if isinstance(bias, Mapping) else bias, "logit_bias")
    for pair in pairs:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and is_number(pair[1], -LARGEST, LARGEST)):
            raise ClearheadError(
                f"logit_bias has {pair!r}; give token ids, each with a bias from {-LARGEST:g} to {LARGEST:g}"
            )
    ids = checked_ids((token for token, _ in pairs), "logit_bias")
    if len(set(ids)) < len(ids):
        raise ClearheadError("logit_bias names a token twice; give each token one bias")
    return tuple((token, value) for token, value in pairs)


def checked_stop(stop: str | Iterable[str]) -> tuple[str, ...]:
    strings = listed((stop,) if isinstance(stop, str) else stop, "stop")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ClearheadError(f"stop has {string!r}; a stop string is text of at least one character")
    return strings


CHAT = SamplingOptions(max_new_tokens=512, temperature=0.7)  # unless a talk at the terminal asks otherwise
