"""The error raised for invalid user input: one sentence that says what is wrong and what would work.

    raise unknown_name("preset", "gtp2", presets())   # unknown preset 'gtp2'; did you mean 'gpt2'?

A defect in Clearhead itself raises an ordinary exception and shows its traceback.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches

_MAX_LISTED_WITH_SUGGESTION = 8
_MAX_LISTED = 12
_MAX_VALUE_CHARACTERS = 80
_MAX_MESSAGE_CHARACTERS = 4000
# Messages of CUDA and Apple's GPUs, of the CPU, and for a buffer too large for Apple's GPUs. Only CUDA has a type.
_OUT_OF_MEMORY = "out of memory|can't allocate memory|Invalid buffer size"


class ClearheadError(ValueError):
    """Invalid input, described in one sentence. The command line prints it without a traceback.

    The middle of a very long message is left out: a message may quote the text of a file, or the error of a library.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(_without_middle(message))


def _without_middle(message: str) -> str:
    if len(message) <= _MAX_MESSAGE_CHARACTERS:
        return message
    half = _MAX_MESSAGE_CHARACTERS // 2
    return f"{message[:half]} … {message[-half:]}"


def shorten(text: str, max_characters: int = _MAX_VALUE_CHARACTERS) -> str:
    """Return a text for a message; if it is longer than `max_characters`, only its start, followed by …"""
    return text if len(text) <= max_characters else text[:max_characters] + "…"


def quote(value: object) -> str:
    """Return the repr of a value for a message, shortened: a value of a file can have millions of characters."""
    if isinstance(value, (str, bytes)):
        is_cut = len(value) > _MAX_VALUE_CHARACTERS
        return repr(value[:_MAX_VALUE_CHARACTERS]) + "…" * is_cut
    try:
        return shorten(repr(value))
    except (ValueError, RecursionError):  # an integer of more than 4300 digits, or lists nested too deep
        return f"a value of type {type(value).__name__} that is too large to show"


def require(condition: bool, message: str) -> None:
    """Raise ClearheadError with `message` unless `condition` holds."""
    if not condition:
        raise ClearheadError(message)


def join_choices(choices: Iterable[str]) -> str:
    """Return choices as a part of a sentence: `a, b or c`."""
    *first, last = choices
    return f"{', '.join(first)} or {last}" if first else last


def unknown_name(kind: str, name: str, choices: Iterable[str], where_listed: str = "") -> ClearheadError:
    """Return the error for a name that is not among `choices`.

    The message suggests the nearest name and lists the choices if they are few. If there are too many to list, pass
    `where_listed`, a sentence that says where the user finds them.
    """
    names = sorted(choices)
    by_lower_case = {choice.lower(): choice for choice in names}
    num_suggestions = 3 if where_listed else 1
    longer = [choice for choice in by_lower_case if choice.startswith(f"{name.lower()}-")]  # llama-3-8b for llama-3
    close = get_close_matches(name.lower(), by_lower_case, n=num_suggestions, cutoff=0.6)
    matches = list(dict.fromkeys([*get_close_matches(name.lower(), longer, n=2, cutoff=0), *close]))[:num_suggestions]
    parts = []
    if matches:
        parts.append(f"did you mean {join_choices(repr(by_lower_case[match]) for match in matches)}?")
    if where_listed:
        parts.append(where_listed)
    elif not matches:
        listed = ", ".join(names[:_MAX_LISTED]) or "(none)"
        parts.append(f"available: {listed}{', …' * (len(names) > _MAX_LISTED)}")
    elif 1 < len(names) <= _MAX_LISTED_WITH_SUGGESTION:
        parts.append(f"Available: {', '.join(names)}")
    return ClearheadError(f"unknown {kind} {quote(name)}; {' '.join(parts)}")


def out_of_memory_message(error: BaseException) -> str | None:
    """Return one sentence for the user if an error means that memory ran out while generating, else None."""
    if not isinstance(error, MemoryError) and not re.search(_OUT_OF_MEMORY, str(error)):
        return None
    return (
        "there is not enough memory for this many tokens; use a shorter prompt, fewer prompts at once or a lower "
        "max_new_tokens"
    )
