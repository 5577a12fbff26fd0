"""What every tokenizer offers, and a decoder that turns a stream of ids into whole characters.

decoder = StreamDecoder(tokenizer)
text = "".join(map(decoder.push, ids)) + decoder.finish()   # tokenizer.decode(ids)
"""

from codecs import getincrementaldecoder
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol


class Tokenizer(Protocol):
    """Text to ids and back. An id is None where the vocabulary has no such token."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int | None: ...

    @property
    def pad_id(self) -> int | None: ...

    @property
    def unknown_id(self) -> int | None: ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a reply: end of text and end of turn."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that decoding leaves out unless it is asked to keep them."""

    @property
    def chat_template(self) -> str | None:
        """The Jinja source that `chat.render_chat` fills in."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, framed by the special tokens the model was trained with."""

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int, after: int | None) -> bytes:
        """The UTF-8 bytes this token adds to a text that ends in token `after` (None: an empty text)."""

    def token_text(self, token_id: int) -> str:
        """One token in readable form: spaces as spaces, bytes that are no whole character as `\\xe4`."""

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json as Hugging Face libraries read them."""


class StreamDecoder:
    """Decode ids one by one; each piece is whole characters, and the pieces join to the whole text.

    A token can end in the middle of a character. Its bytes wait here until the character is complete
    or known to be broken; only then does a broken one become U+FFFD. The work per token is constant.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, after: int | None = None) -> None:
        """`after`: the token that the text continues; None where it begins."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = getincrementaldecoder("utf-8")(errors="replace")
        self._previous = after

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        # Output layers are often padded beyond the vocabulary; an id from there has no text.
        if token_id in self._skipped or token_id >= self._tokenizer.vocab_size:
            return ""
        added = self._tokenizer.token_bytes(token_id, after=self._previous)
        self._previous = token_id
        return self._utf8.decode(added)

    def finish(self) -> str:
        """What is left of an unfinished character; the decoder then starts a new text."""
        self._previous = None
        return self._utf8.decode(b"", final=True)
