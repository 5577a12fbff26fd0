"""Read preferences: prompts with a chosen and a rejected answer, and make batches of pairs of them.

    {"prompt": "Say hello.", "chosen": "Hello!", "rejected": "No."}
    {"messages": [{"role": "user", "content": ...}], "chosen": {"role": "assistant", ...}, "rejected": {...}}
    {"chosen": [{"role": "user", ...}, {"role": "assistant", ...}], "rejected": [{"role": "user", ...}, ...]}

A prompt is a text or a list of messages, under `prompt` or `messages`. An answer is a text, a message or a list of
messages. A list may repeat the prompt; without a prompt, both lists begin with the same messages.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.data.batch import PreferenceBatch
from clearhead.data.chats import Chat, check_messages
from clearhead.data.counter_random import Ids, Keys
from clearhead.data.datasets import Example, Examples
from clearhead.data.objectives import supervised_chat
from clearhead.data.sources import read_json_lines
from clearhead.errors import ClearheadError
from clearhead.tokenization import Tokenizer


@dataclass(frozen=True)
class Preference:
    """A prompt and two answers to it."""

    prompt: Chat
    chosen: Chat
    rejected: Chat


def read_preferences(path: str | Path) -> list[Preference]:
    """Return the preferences of a JSON lines file. Raise ClearheadError with the number of a line that has none."""
    if not Path(path).is_file():
        raise ClearheadError(f"{path} does not exist; give a JSON lines file of preferences")
    preferences = [_parse(entry, f"line {number} of {path}") for number, entry in read_json_lines(path)]
    if not preferences:
        raise ClearheadError(f"{path} is empty; it must contain at least one preference")
    return preferences


def _parse(entry: Mapping[str, Any], where: str) -> Preference:
    """Return the preference of an entry."""
    for key in ("chosen", "rejected"):
        if key not in entry:
            raise ClearheadError(f'{where} has no "{key}" answer; its keys are: {", ".join(entry)}')
    key = "messages" if "messages" in entry else "prompt"
    prompt = _to_messages(entry[key], "user", where, key) if key in entry else []
    chosen, rejected = (_to_messages(entry[name], "assistant", where, name) for name in ("chosen", "rejected"))
    if not prompt:
        length = next((n for n, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1]), 0)
        prompt = chosen[:length]
    chosen, rejected = (_without_prompt(answer, prompt) for answer in (chosen, rejected))
    if not prompt or prompt[-1]["role"] == "assistant":
        raise ClearheadError(
            f"{where} has no valid prompt; it must be a text, or messages of which the last is not the assistant's"
        )
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if [message["role"] for message in answer] != ["assistant"]:
            raise ClearheadError(f'{where} must have one message of the assistant as its "{name}" answer')
    if chosen == rejected:
        raise ClearheadError(f"{where} has equal answers; a preference needs two different ones")
    return Preference(prompt, chosen, rejected)


def _to_messages(value: Any, role: str, where: str, key: str) -> Chat:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return check_messages([value] if isinstance(value, dict) else value, where, key)


def _without_prompt(answer: Chat, prompt: Chat) -> Chat:
    """Return an answer without the prompt, if it repeats that."""
    return answer[len(prompt) :] if list(answer[: len(prompt)]) == list(prompt) else answer


class Preferences:
    """Pairs of rows, one for each answer, padded to the longest of a batch."""

    def __init__(self, preferences: Iterable[Preference], tokenizer: Tokenizer, pad_id: int, context: int) -> None:
        """Drop the pairs of which one row is longer than `context`; `num_too_long` is their number."""
        pairs = [_encode(preference, tokenizer) for preference in preferences]
        longest = np.array([max(row.length for row in pair) for pair in pairs])
        kept = [pair for pair, length in zip(pairs, longest, strict=True) if length <= context]
        if not kept:
            raise ClearheadError(
                f"none of the {len(pairs)} preferences fits data.context {context}; the shortest has {longest.min()} "
                "tokens, so raise data.context"
            )
        self.num_too_long = len(pairs) - len(kept)
        self.lengths: NDArray[np.int64] = longest[longest <= context]
        self._rows = Examples((row for pair in kept for row in pair), pad_id, context)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, rows: Ids, keys: Keys) -> PreferenceBatch:
        """Return these pairs as one batch, with two rows each."""
        both = np.stack((2 * rows, 2 * rows + 1), axis=1).reshape(-1)
        return PreferenceBatch(**vars(self._rows.batch(both, np.repeat(keys, 2))))


def _encode(preference: Preference, tokenizer: Tokenizer) -> tuple[Example, Example]:
    """Return the rows of the chosen and of the rejected answer. Earlier messages have no targets."""
    first = len(preference.prompt)
    chosen, rejected = (
        Example(*supervised_chat(tokenizer, [*preference.prompt, *answer], first_answer=first))
        for answer in (preference.chosen, preference.rejected)
    )
    return chosen, rejected
