"""TokenScore: one token of an answer with its log-probability, and the alternatives to it. Without HTTP.

scorer = TokenScorer(tokenizer, previous_id=None); score = scorer.score(token, logprobs)
"""

import math
from codecs import getincrementaldecoder
from dataclasses import dataclass
from typing import Any

from clearhead.tokenization import Tokenizer

_LEAST = -9999.0  # stands for log 0, which JSON has no number for


@dataclass(frozen=True)
class TokenText:
    """A token as clients see it: its text, and its bytes where these are not whole characters."""

    text: str
    content: bytes


@dataclass(frozen=True)
class TokenScore:
    """A token with its log-probability; None for the first token of a text, which nothing precedes.

    alternatives: the most likely tokens, the most likely first. offset: characters of the text before this token.
    """

    token: TokenText
    logprob: float | None
    alternatives: list[tuple[TokenText, float]]
    offset: int
    is_special: bool


class TokenScorer:
    """Describes the tokens of one text, one after another."""

    def __init__(self, tokenizer: Tokenizer | None, previous_id: int | None, offset: int = 0):
        self.offset = offset  # characters so far
        self._tokenizer = tokenizer
        self._previous_id = previous_id
        self._utf8 = getincrementaldecoder("utf-8")(errors="replace")

    def score(self, token: int, chosen: float | None, top: list[tuple[int, float]]) -> TokenScore:
        """Describe the next token. top: ids and log-probabilities of the most likely tokens."""
        text, is_special = self._describe(token), self._is_special(token)
        alternatives = [(self._describe(each), _finite(value)) for each, value in top]
        score = TokenScore(text, None if chosen is None else _finite(chosen), alternatives, self.offset, is_special)
        if not is_special:
            self._previous_id = token
            self.offset += len(self._utf8.decode(text.content))
        return score

    def _is_special(self, token: int) -> bool:
        return self._tokenizer is None or token in self._tokenizer.special_ids or token >= self._tokenizer.vocab_size

    def _describe(self, token: int) -> TokenText:
        if self._tokenizer is None:
            return TokenText(f"token_id:{token}", b"")
        if self._is_special(token):
            text = self._tokenizer.token_text(token)
            return TokenText(text, text.encode("utf-8", "replace"))
        content = self._tokenizer.token_bytes(token, previous_id=self._previous_id)
        try:
            return TokenText(content.decode("utf-8"), content)
        except UnicodeDecodeError:  # a part of a character, written as in OpenAI's API
            return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in content), content)


def step_scores(logprobs: Any) -> tuple[float, list[tuple[int, float]]]:
    """Return the log-probability of the chosen token and those of the most likely tokens, from a TokenLogprobs."""
    return float(logprobs.chosen), list(zip(logprobs.top_ids.tolist(), logprobs.top.tolist(), strict=True))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LEAST
