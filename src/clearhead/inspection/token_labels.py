"""Texts of tokens, and printable labels: one line, no invisible characters, escapes or changes of text direction.

printable(" the")   # '␣the'
"""

from clearhead.tokenization import Tokenizer

SYMBOLS = {" ": "␣", "\n": "⏎", "\t": "⇥"}


def printable(text: str, max_length: int | None = None) -> str:
    """Return the text with symbols for whitespace and escapes such as `\\x1b` for other invisible characters."""
    shown = "".join(SYMBOLS.get(char) or (char if char.isprintable() else escape(char)) for char in text)
    if max_length is not None and len(shown) > max_length:
        return shown[: max_length - 1] + "…"
    return shown


def escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def token_text(token: int, tokenizer: Tokenizer | None) -> str:
    """Return the text of a token, or its id if the tokenizer has no such token: vocabularies are often padded."""
    return str(token) if tokenizer is None or token >= tokenizer.vocab_size else tokenizer.token_text(token)
