"""Token texts as labels: on one line, with no invisible characters, terminal escapes or changes of text direction.

printable(" the")   # '␣the'
"""

SYMBOLS = {" ": "␣", "\n": "⏎", "\t": "⇥"}


def printable(text: str, max_length: int | None = None) -> str:
    """Return the text with symbols for whitespace and escapes such as `\\x1b` for other invisible characters."""
    shown = "".join(SYMBOLS.get(char) or (char if char.isprintable() else escape(char)) for char in text)
    if max_length is not None and len(shown) > max_length:
        return shown[: max_length - 1] + "…"
    return shown


def escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
