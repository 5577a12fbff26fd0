"""Options of text generation, checked when they are created. This module does not import torch.

    options = SamplingOptions(temperature=0.8, top_p=0.95, seed=7, stop=["\\n\\n"])

SamplingOptions and BeamOptions hold the values and their descriptions. SamplingKeywords and GenerateKeywords name the
same options for editors and type checkers; tests/test_options.py compares both.
"""

import inspect
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Literal, TypedDict, TypeVar, get_args

from clearhead.errors import ClearheadError, quote, unknown_name

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])
StopWhen = Literal["full", "unlikely", "impossible"]
# Bounds of temperatures, penalties and biases: products and quotients with logits stay finite in float32.
_SMALLEST, LARGEST = 1e-6, 1e9
_MAX_LENGTH_PENALTY = 10.0  # length ** 10 is finite for any length


def described(default: T, description: str) -> T:
    """Return a dataclass field with a default and a one-line description, which help texts show."""
    return field(default=default, metadata={"description": description})


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The options of one sequence. None disables an option.

    Greedy decoding (temperature 0) takes the most likely token, which top_k, top_p and min_p always keep. The
    repetition penalty counts tokens of the prompt and the output (CTRL, Keskar et al. 2019, §4.1), the presence and
    frequency penalties count tokens of the output only (OpenAI).
    """

    max_new_tokens: int = described(128, "Maximum number of new tokens.")
    min_new_tokens: int = described(
        0, "Minimum number of new tokens; no stop token or stop string ends the text earlier."
    )
    temperature: float = described(0.0, "0 takes the most likely token; 1 samples from the model's distribution.")
    top_k: int | None = described(None, "Sample only from the k most likely tokens.")
    top_p: float | None = described(
        None, "Sample only from the smallest set of most likely tokens that reaches this total probability."
    )
    min_p: float | None = described(None, "Sample only tokens with at least this share of the highest probability.")
    repetition_penalty: float = described(
        1.0, "Above 1, tokens that occur in the prompt or the output become less likely."
    )
    presence_penalty: float = described(0.0, "Value to subtract from the logit of each token that the output contains.")
    frequency_penalty: float = described(
        0.0, "Value to subtract from a token's logit for each of its occurrences in the output."
    )
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = described(  # stored as a tuple of pairs
        (), "Values to add to the logits of tokens, by token id."
    )
    seed: int | None = described(None, "Seed of sampling; without it, every call samples a different text.")
    stop: str | Iterable[str] = described((), "String or strings that end the text.")  # stored as a tuple
    stop_ids: Iterable[int] = described((), "Token ids that end the text, besides the model's own.")  # as a tuple
    logprobs: int | None = described(
        None, "Return the log-probability of each token, and of this many most likely alternatives to it."
    )

    def __post_init__(self) -> None:
        for name, (is_valid, requirement) in _REQUIREMENTS.items():
            value = getattr(self, name)
            if not is_valid(value) and not (value is None and name in _OPTIONAL):
                raise ClearheadError(f"{name} is {quote(value)}; it must be {requirement}")
        if self.min_new_tokens > self.max_new_tokens:
            raise ClearheadError(
                f"min_new_tokens is {self.min_new_tokens}; it must not exceed max_new_tokens, {self.max_new_tokens}"
            )
        object.__setattr__(self, "logit_bias", _parse_logit_bias(self.logit_bias))
        object.__setattr__(self, "stop", parse_stop_strings(self.stop))
        object.__setattr__(self, "stop_ids", _parse_token_ids(self.stop_ids, "stop_ids"))

    @property
    def is_greedy(self) -> bool:
        """Whether every step takes the most likely token."""
        return self.temperature == 0

    def with_seed(self) -> "SamplingOptions":
        """Return options that have a seed: their own, or a random one."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))

    def for_samples(self, n: int) -> "list[SamplingOptions]":
        """Return the options of n texts of one prompt: consecutive seeds, wrapped to 64 bits."""
        first = self.with_seed().seed or 0
        return [replace(self, seed=(first + number + 2**63) % 2**64 - 2**63) for number in range(n)]

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ClearheadError if logit_bias or stop_ids contain an id outside the vocabulary."""
        for name, ids in (("logit_bias", dict(self.logit_bias)), ("stop_ids", tuple(self.stop_ids))):
            last = vocab_size - 1
            if ids and (token := max(ids)) > last:
                raise ClearheadError(f"{name} contains token {token}; the vocabulary has the ids 0 to {last}")


@dataclass(frozen=True, kw_only=True)
class BeamOptions:
    """The options of a beam search.

    stop_when says when a search ends after num_beams beams have finished. transformers calls it `early_stopping`:

        full         immediately                                                                             True
        unlikely     if the most likely running beam, ending now, would not beat the worst finished one      False
        impossible   if it could not beat it at any length, even if all further tokens were certain          "never"
    """

    num_beams: int
    num_best: int = 1
    max_new_tokens: int = described(128, "Maximum number of new tokens.")
    length_penalty: float = described(
        1.0, "A beam's log-probability is divided by its length to this power; above 0 favors long texts."
    )
    stop_when: StopWhen = described(
        "unlikely", "When a beam search ends: full, unlikely or impossible; see clearhead.options.BeamOptions."
    )
    stop_ids: Iterable[int] = described((), "Token ids that end the text, besides the model's own.")  # as a tuple

    def __post_init__(self) -> None:
        for name in ("num_beams", "num_best", "max_new_tokens"):
            check_positive_integer(name, getattr(self, name))
        if self.num_best > self.num_beams:
            raise ClearheadError(f"num_best is {self.num_best}; it must not exceed num_beams, {self.num_beams}")
        if not _is_number(self.length_penalty, -_MAX_LENGTH_PENALTY, _MAX_LENGTH_PENALTY):
            raise ClearheadError(f"length_penalty is {quote(self.length_penalty)}; it must be from -10 to 10")
        if self.stop_when not in get_args(StopWhen):
            raise unknown_name("stop_when", str(self.stop_when), get_args(StopWhen))
        object.__setattr__(self, "stop_ids", _parse_token_ids(self.stop_ids, "stop_ids"))


# --- the same options as keyword arguments


class SamplingKeywords(TypedDict, total=False):
    """Keyword options of Model.stream, Chat.say and Chat.stream; SamplingOptions describes them."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]]
    seed: int | None
    stop: str | Iterable[str]
    stop_ids: Iterable[int]
    logprobs: int | None


class GenerateKeywords(SamplingKeywords, total=False):
    """Keyword options of Model.generate and Model.generate_many: those of sampling, and those of beam search."""

    length_penalty: float
    stop_when: StopWhen


_SAMPLING_NAMES = frozenset(each.name for each in fields(SamplingOptions))
_BEAM_NAMES = frozenset(each.name for each in fields(BeamOptions)) - {"num_beams", "num_best"}
GENERATE_ARGUMENTS = ("n", "beams", "speculate", "deterministic", "progress")  # not options


def check_names(options: Mapping[str, object], beams: bool) -> None:
    """Raise ClearheadError for an option that does not exist, or that has no effect with (or without) beams."""
    known, others = (_BEAM_NAMES, _SAMPLING_NAMES) if beams else (_SAMPLING_NAMES, _BEAM_NAMES)
    for name in options:
        if name not in known and name in others:
            raise ClearheadError(f"{name} has no effect {'with' if beams else 'without'} beams; leave it out")
        if name not in known:
            raise unknown_name("option of generate:", name, {*known, *GENERATE_ARGUMENTS})


def check_temperature_is_set(options: Mapping[str, object], n: int = 1) -> None:
    """Raise ClearheadError if options that only affect sampling are given without a temperature."""
    if options.get("temperature") is not None:
        return
    idle = next((name for name in ("top_k", "top_p", "min_p", "seed") if options.get(name) is not None), None)
    if idle is not None:
        raise ClearheadError(
            f"{idle} has no effect at temperature 0, which takes the most likely token; to sample, use temperature 1"
        )
    if n > 1:
        raise ClearheadError(
            f"n is {n}, but at temperature 0 all texts would be the same; to sample, use temperature 1"
        )


def documents_options(*classes: type) -> Callable[[Function], Function]:
    """Append the options of these classes, with defaults and descriptions, to the docstring of a function."""
    described_fields = {each.name: each for part in classes for each in option_fields(part)}
    lines = [f"    {each.name}={each.default!r}: {description_of(each)}" for each in described_fields.values()]

    def decorate(function: Function) -> Function:
        if function.__doc__ is not None:  # absent under python -OO
            function.__doc__ = "\n".join((inspect.cleandoc(function.__doc__), "", "Options:", *lines))
        return function

    return decorate


def option_fields(options: type) -> list[Field[Any]]:
    """Return the fields of an options class that have a description."""
    return [each for each in fields(options) if "description" in each.metadata]


def description_of(option: Field[Any]) -> str:
    """Return the one-line description of an option."""
    return str(option.metadata["description"])


# --- checks of values


def _is_integer(value: object, minimum: int = 0) -> bool:
    """Return whether a value is an integer of at most 64 bits and at least `minimum`; a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value < 2**63


def _is_number(value: object, minimum: float, maximum: float) -> bool:
    """Return whether a value is an int or float in a range; a bool is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and minimum <= value <= maximum


_REQUIREMENTS: dict[str, tuple[Callable[[object], bool], str]] = {
    "max_new_tokens": (_is_integer, "a whole number, 0 or more"),
    "min_new_tokens": (_is_integer, "a whole number, 0 or more"),
    "temperature": (
        lambda value: _is_number(value, 0, 0) or _is_number(value, _SMALLEST, LARGEST),
        f"0 for the most likely token, or from {_SMALLEST:g} to {LARGEST:g}",
    ),
    "top_k": (lambda value: _is_integer(value, minimum=1), "a whole number, 1 or more; without it every token is kept"),
    "top_p": (lambda value: _is_number(value, math.ulp(0), 1), "greater than 0 and at most 1"),
    "min_p": (lambda value: _is_number(value, 0, 1), "from 0 to 1"),
    "repetition_penalty": (
        lambda value: _is_number(value, _SMALLEST, LARGEST),
        f"from {_SMALLEST:g} to {LARGEST:g}; 1 disables it",
    ),
    "presence_penalty": (lambda value: _is_number(value, -LARGEST, LARGEST), f"from {-LARGEST:g} to {LARGEST:g}"),
    "frequency_penalty": (lambda value: _is_number(value, -LARGEST, LARGEST), f"from {-LARGEST:g} to {LARGEST:g}"),
    "seed": (lambda value: _is_integer(value, minimum=-(2**63)), "a whole number of 64 bits"),
    "logprobs": (_is_integer, "a whole number, 0 or more"),
}
_OPTIONAL = {each.name for each in fields(SamplingOptions) if each.default is None}


def check_positive_integer(name: str, value: object, at_most: int | None = None) -> None:
    """Raise ClearheadError unless the value of this option is an integer from 1 to `at_most`."""
    if not _is_integer(value, minimum=1):
        raise ClearheadError(f"{name} is {quote(value)}; it must be a whole number, 1 or more")
    if at_most is not None and int(str(value)) > at_most:
        raise ClearheadError(f"{name} is {value}; it must be at most {at_most}")


def _as_tuple(values: Any, name: str) -> tuple[Any, ...]:
    if not isinstance(values, Iterable):
        raise ClearheadError(f"{name} is {quote(values)}; it must be a list")
    return tuple(values)


def _parse_token_ids(ids: Iterable[int], name: str) -> tuple[int, ...]:
    """Return token ids as a tuple; raise ClearheadError unless all are integers of at least 0."""
    token_ids = _as_tuple(ids, name)
    for token in token_ids:
        if not _is_integer(token):
            raise ClearheadError(f"{name} contains {quote(token)}; a token id is a whole number, 0 or more")
    return token_ids


def _parse_logit_bias(bias: Mapping[int, float] | Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return pairs of token id and bias; raise ClearheadError unless they are valid and each token occurs once."""
    pairs = _as_tuple(bias.items() if isinstance(bias, Mapping) else bias, "logit_bias")
    for pair in pairs:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and _is_number(pair[1], -LARGEST, LARGEST)):
            raise ClearheadError(
                f"logit_bias contains {quote(pair)}; give token ids, each with a bias from {-LARGEST:g} to {LARGEST:g}"
            )
    ids = _parse_token_ids((token for token, _ in pairs), "logit_bias")
    if len(set(ids)) < len(ids):
        raise ClearheadError("logit_bias contains a token twice; give each token one bias")
    return tuple((token, value) for token, value in pairs)


def parse_stop_strings(stop: str | Iterable[str]) -> tuple[str, ...]:
    """Return stop strings as a tuple; raise ClearheadError unless all are strings of at least one character."""
    strings = _as_tuple((stop,) if isinstance(stop, str) else stop, "stop")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ClearheadError(f"stop contains {quote(string)}; a stop string has at least one character")
    return strings


CHAT_DEFAULTS = SamplingOptions(max_new_tokens=512, temperature=0.7)  # the defaults of `clearhead chat`
