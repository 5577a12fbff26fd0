"""Token texts as they are shown: one line, nothing invisible, nothing that steers a terminal or turns the writing.

visible(" the")   # '␣the'
"""

SIGNS = {" ": "␣", "\n": "⏎", "\t": "⇥"}


def visible(text: str, longest: int | None = None) -> str:
    """Spaces and ends of lines as signs; other invisible characters, escape sequences among them, as `\\x1b`."""
    shown = "".join(SIGNS.get(letter) or (letter if letter.isprintable() else escaped(letter)) for letter in text)
    if longest is not None and len(shown) > longest:
        return shown[: longest - 1] + "…"
    return shown


def escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
