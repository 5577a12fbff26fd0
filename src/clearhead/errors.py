"""The one error a user can cause: a sentence that says what is wrong and what would work.

    raise unknown("preset", "gtp2", presets())   # unknown preset 'gtp2'; did you mean 'gpt2'?

Whatever goes wrong through a bug of ours stays an ordinary exception with its traceback.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class ClearheadError(ValueError):
    """Bad input: one clear sentence. The command line prints it without a traceback."""


def unknown(kind: str, name: str, choices: Iterable[str]) -> ClearheadError:
    """The error for a name that is not among `choices`, with the nearest right one or all of them."""
    known = sorted(choices)
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return ClearheadError(f"unknown {kind} {name!r}; did you mean {near[0]!r}?")
    shown = ", ".join(known[:12]) + (", …" if len(known) > 12 else "")
    return ClearheadError(f"unknown {kind} {name!r}; known are: {shown or '(none)'}")
