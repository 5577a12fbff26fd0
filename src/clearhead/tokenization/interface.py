"""The interface of every tokenizer, and a decoder that turns a stream of ids into text.

decoder = StreamDecoder(tokenizer)
text = "".join(map(decoder.push, ids)) + decoder.finish()   # tokenizer.decode(ids)
"""

from codecs import utf_8_decode
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol


class Tokenizer(Protocol):
    """Converts text to token ids and back.

    The id of a special token is None if the vocabulary has no such token.
    """

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def bos_id(self) -> int | None:
        """The id of the token that begins a text."""

    @property
    def eos_id(self) -> int | None:
        """The id of the token that ends a text."""

    @property
    def pad_id(self) -> int | None:
        """The id of the padding token."""

    @property
    def unknown_id(self) -> int | None:
        """The id that stands for text outside the vocabulary."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a reply: end of text and end of turn."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that decoding skips by default."""

    @property
    def chat_template(self) -> str | None:
        """The Jinja source that `render_chat` fills in."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, by default with the special tokens that the model expects around it."""

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; invalid UTF-8 becomes U+FFFD."""

    def token_bytes(self, token_id: int, previous_id: int | None) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text that ends in `previous_id` (None: an empty text)."""

    def token_text(self, token_id: int) -> str:
        """Return one token in readable form: spaces as spaces, incomplete characters as `\\xe4`."""

    def save(self, folder: str | Path) -> None:
        """Write the files from which Hugging Face libraries load this tokenizer."""


class StreamDecoder:
    """Decodes ids one at a time into pieces of whole characters; the pieces concatenate to the decoded text.

    A token can end in the middle of a character. Its bytes are held back until the character is complete or known to
    be invalid; only an invalid one becomes U+FFFD. The work per token is constant.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, previous_id: int | None = None) -> None:
        """Start after the token `previous_id`; None starts a new text."""
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._incomplete = b""  # the first bytes of a character
        self._previous_id = previous_id

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes."""
        # The output layer is often larger than the vocabulary; an id beyond the vocabulary has no text.
        if token_id in self._skipped_ids or token_id >= self._tokenizer.vocab_size:
            return ""
        added = self._tokenizer.token_bytes(token_id, previous_id=self._previous_id)
        self._previous_id = token_id
        content = self._incomplete + added
        text, num_decoded = utf_8_decode(content, "replace", False)
        self._incomplete = content[num_decoded:]
        return text

    def finish(self) -> str:
        """Return U+FFFD for an incomplete character, if there is one, and start a new text."""
        incomplete, self._incomplete, self._previous_id = self._incomplete, b"", None
        return incomplete.decode("utf-8", "replace")
