"""The one error a user can cause: a sentence that says what is wrong and what would work.

    raise unknown("preset", "gtp2", presets())   # unknown preset 'gtp2'; did you mean 'gpt2'?

Whatever goes wrong through a bug of ours stays an ordinary exception with its traceback.
"""

from collections.abc import Iterable
from difflib import get_close_matches

FEW = 8  # names that a sentence can hold


class ClearheadError(ValueError):
    """Bad input: one clear sentence. The command line prints it without a traceback."""


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ClearheadError(sentence)


def unknown_name(kind: str, name: str, choices: Iterable[str], lists: str = "") -> ClearheadError:
    """The error for a name that is not among `choices`: the nearest right one, and all of them where they are few.

    `lists` says where all are told, for choices that are too many to name.
    """
    known = sorted(choices)
    spelled = {choice.lower(): choice for choice in known}
    near = [spelled[match] for match in get_close_matches(name.lower(), spelled, n=3 if lists else 1, cutoff=0.6)]
    said = [f"did you mean {' or '.join(map(repr, near))}?"] if near else []
    if lists:
        said.append(lists)
    elif not near:
        said.append(f"known are: {', '.join(known[:12]) or '(none)'}{', …' * (len(known) > 12)}")
    elif 1 < len(known) <= FEW:
        said.append(f"Known are: {', '.join(known)}")
    return ClearheadError(f"unknown {kind} {name!r}; {' '.join(said)}")
