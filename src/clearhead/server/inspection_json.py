"""Turn tensors, token ids and traces into JSON data for the page.

    array_data(trace.attention(3, 2))   # {"type": "float32", "shape": [8, 8], "data": base64}

Large arrays are base64 of little-endian numbers, since a browser reads these into a typed array without parsing. Small
ones are lists; a number that is not finite becomes null there, because JSON has no name for it.
"""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import ClearheadError, quote
from clearhead.inspection import Effect
from clearhead.tokenization import Tokenizer

_LITTLE_ENDIAN = {torch.float32: "<f4", torch.uint8: "u1"}


def array_data(tensor: Tensor) -> dict[str, Any]:
    """Return a tensor of bytes, booleans or floating-point numbers; the latter as float32."""
    tensor = tensor.detach().cpu()
    tensor = tensor.to(torch.uint8 if tensor.dtype in (torch.bool, torch.uint8) else torch.float32).contiguous()
    content = tensor.numpy().astype(_LITTLE_ENDIAN[tensor.dtype]).tobytes()
    return {
        "type": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "data": base64.b64encode(content).decode("ascii"),
    }


def number(value: float) -> float | None:
    """Return a number that JSON can hold; None stands for NaN and infinities."""
    return value if math.isfinite(value) else None


def numbers(tensor: Tensor) -> list[Any]:
    """Return a tensor of one dimension or more as nested lists of numbers."""
    if tensor.dim() > 1:
        return [numbers(part) for part in tensor]
    return [number(value) for value in tensor.detach().cpu().tolist()]


@dataclass(frozen=True)
class TokenTexts:
    """The texts and bytes of token ids; without a tokenizer, a token's text is its id."""

    tokenizer: Tokenizer | None

    def text(self, token: int) -> str:
        """Return the text of a token, or its id if the tokenizer has no such token: vocabularies are often padded."""
        return self.tokenizer.token_text(token) if self._is_known(token) and self.tokenizer else str(token)

    def texts(self, tokens: Sequence[int]) -> dict[str, str]:
        """Return the texts of tokens by their ids; JSON has only texts as keys."""
        return {str(token): self.text(token) for token in dict.fromkeys(tokens)}

    def describe(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """Return id, text and bytes of each token of a text, and whether it is a special one."""
        special = frozenset[int]() if self.tokenizer is None else self.tokenizer.special_ids
        previous: list[int | None] = [None, *tokens]
        return [
            {
                "id": token,
                "text": self.text(token),
                "bytes": self._bytes(token, before).hex(" "),
                "special": token in special,
            }
            for token, before in zip(tokens, previous, strict=False)
        ]

    def find(self, content: bytes, starts_text: bool = False) -> int | None:
        """Return the id of the token with these bytes in the middle or at the start of a text; None if there is none.

        Where several tokens have the same bytes, the last is taken: vocabularies begin with single bytes, which stand
        for themselves only where nothing else does. At the start of a text, tokens that begin a word come first: some
        tokenizers drop their space there.
        """
        return (self._ids_at_start if starts_text else self._ids_by_bytes).get(content)

    @cached_property
    def _ids_by_bytes(self) -> dict[bytes, int]:
        if self.tokenizer is None:
            return {}
        ordinary = (token for token in range(self.tokenizer.vocab_size) if token not in self.tokenizer.special_ids)
        before = next((token for token in ordinary if self._bytes(token, None)), None)
        return {self._bytes(token, before): token for token in range(self.tokenizer.vocab_size)}

    @cached_property
    def _ids_at_start(self) -> dict[bytes, int]:
        found = {self._bytes(token, None): token for token in self._ids_by_bytes.values()}
        words = [token for content, token in self._ids_by_bytes.items() if content.startswith(b" ")]
        return found | {self._bytes(token, None): token for token in words}

    def _bytes(self, token: int, previous: int | None) -> bytes:
        if self.tokenizer is None or not self._is_known(token):
            return b""
        if token in self.tokenizer.special_ids:
            return self.tokenizer.token_text(token).encode()
        known = previous if previous is not None and self._is_known(previous) else None
        return self.tokenizer.token_bytes(token, known)

    def _is_known(self, token: int) -> bool:
        return self.tokenizer is not None and token < self.tokenizer.vocab_size


def candidates_data(pairs: Sequence[tuple[int, float]], texts: TokenTexts) -> list[dict[str, Any]]:
    """Return tokens with their probabilities."""
    return [{"id": token, "text": texts.text(token), "probability": number(value)} for token, value in pairs]


def effect_data(effect: Effect, token: int, texts: TokenTexts) -> dict[str, Any]:
    """Return what an intervention changes: the divergence, the gain of one token, and the most likely tokens."""
    return {
        "divergence": number(effect.divergence),
        "gain": number(effect.gain(token)),
        "before": candidates_data(effect.top_before(8), texts),
        "after": candidates_data(effect.top_after(8), texts),
    }


def bytes_of(piece: str) -> bytes:
    """Return the bytes that are written as hexadecimal numbers."""
    try:
        return bytes.fromhex(piece)
    except ValueError:
        raise ClearheadError(f"the bytes of a token are {quote(piece)}; write them as c3 a9") from None
