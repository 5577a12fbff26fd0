"""Read the fields of a JSON object by type; a wrong or unknown field raises ClearheadError and is named.

fields = Fields({"tokens": [1, 2], "layer": 3}); fields.tokens("tokens"), fields.integer("layer"); fields.finish()
"""

from typing import Any

from clearhead.errors import ClearheadError, quote

MAX_TOKENS = 1024  # per inspected text: the scores and weights of one head are then 8 MiB
_MAX_PIECES = 65_536  # tokens of an answer with their alternatives
_MAX_TEXT = 100_000  # characters
_MAX_MESSAGES = 1024


class Fields:
    """The fields of one request. `finish` refuses those that were not read."""

    def __init__(self, body: Any):
        if not isinstance(body, dict):
            raise ClearheadError(f"the request is {quote(body)}; it must be a JSON object")
        self._body = body
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        """Return whether a field is given and not null."""
        return self._body.get(name) is not None

    def finish(self) -> None:
        """Raise ClearheadError if a field was given that nothing has read."""
        unknown = sorted(set(self._body) - self._read)
        if unknown:
            raise ClearheadError(
                f"unknown field {quote(unknown[0])}; this request takes {', '.join(sorted(self._read))}"
            )

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer field; without a default it is required."""
        value = self.optional_integer(name)
        if value is None:
            if default is None:
                raise ClearheadError(f"the field {name} is missing; it must be an integer")
            return default
        return value

    def optional_integer(self, name: str) -> int | None:
        """Return an integer field, or None."""
        value = self._get(name)
        if value is not None and type(value) is not int:
            raise ClearheadError(f"{name} is {quote(value)}; it must be an integer")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text field; without a default it is required."""
        value = self._get(name)
        value = default if value is None else value
        if not isinstance(value, str) or len(value) > _MAX_TEXT:
            raise ClearheadError(f"{name} is {quote(value)}; it must be a text of at most {_MAX_TEXT:,} characters")
        return value

    def tokens(self, name: str) -> list[int]:
        """Return a list of token ids, short enough to be inspected."""
        value = self._get(name)
        if not isinstance(value, list) or not value or any(type(token) is not int for token in value):
            raise ClearheadError(f"{name} is {quote(value)}; it must be a list of token ids")
        if len(value) > MAX_TOKENS:
            raise ClearheadError(f"the text has {len(value):,} tokens; the page inspects texts of up to {MAX_TOKENS:,}")
        return value

    def integers(self, name: str) -> list[int] | None:
        """Return a list of integers, or None."""
        value = self._get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > MAX_TOKENS or any(type(number) is not int for number in value):
            raise ClearheadError(f"{name} is {quote(value)}; it must be a list of up to {MAX_TOKENS:,} integers")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of texts."""
        value = self._get(name)
        if not isinstance(value, list) or len(value) > _MAX_PIECES or not all(isinstance(text, str) for text in value):
            raise ClearheadError(f"{name} is {quote(value)}; it must be a list of up to {_MAX_PIECES:,} texts")
        return value

    def messages(self, name: str) -> list[dict[str, str]]:
        """Return the messages of a chat, each with a role and a content."""
        value = self._get(name)
        if not isinstance(value, list) or not 1 <= len(value) <= _MAX_MESSAGES:
            raise ClearheadError(f"{name} is {quote(value)}; it must be a list of 1 to {_MAX_MESSAGES} messages")
        for message in value:
            if not isinstance(message, dict) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise ClearheadError(f"a message is {quote(message)}; it must have a role and a content, both texts")
        return [{"role": message["role"], "content": message["content"]} for message in value]

    def objects(self, name: str) -> list["Fields"]:
        """Return a list of objects."""
        value = self._get(name)
        if not isinstance(value, list) or len(value) > MAX_TOKENS:
            raise ClearheadError(f"{name} is {quote(value)}; it must be a list of up to {MAX_TOKENS:,} objects")
        return [Fields(one) for one in value]

    def _get(self, name: str) -> Any:
        self._read.add(name)
        return self._body.get(name)
