"""Which tokens may come next in a transcript.

    logits = TokenRules(speech, timestamps=True).apply(logits, [tokens])

With timestamps, a text consists of segments `<|0.00|> text <|2.40|>`. Timestamps come in pairs, the end of one segment
and the start of the next, except at the start and the end; they do not go back; and if all timestamps together are
likelier than every other token, one of them follows (Radford et al. 2022, §4.5 and its code).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from clearhead.checkpoint import SpeechSettings


@dataclass(frozen=True)
class TokenRules:
    """The rules for one recording."""

    speech: SpeechSettings
    timestamps: bool

    @property
    def first_timestamp(self) -> int:
        """The token of 0.00 seconds."""
        return self.speech.no_timestamps_id + 1

    def apply(self, logits: Tensor, generated: Sequence[Sequence[int]]) -> Tensor:
        """Return logits (B, V) with -∞ for tokens that may not follow the tokens generated so far."""
        logits = logits.clone()
        for row, tokens in zip(logits, generated, strict=True):
            if not tokens:
                row[list(self.speech.suppressed_first)] = -math.inf
            row[list(self.speech.suppressed)] = -math.inf
            if self.timestamps:
                self._order_timestamps(row, tokens)
        if self.timestamps:
            self._prefer_timestamps(logits)
        return logits

    def _order_timestamps(self, row: Tensor, tokens: Sequence[int]) -> None:
        """Exclude timestamps (V,) that are out of order, and text where a timestamp must follow."""
        first = self.first_timestamp
        row[self.speech.no_timestamps_id] = -math.inf
        follows_timestamp = len(tokens) > 0 and tokens[-1] >= first
        starts_segment = len(tokens) < 2 or tokens[-2] >= first
        if follows_timestamp and starts_segment:  # text comes next
            row[first:] = -math.inf
        elif follows_timestamp:  # the start of the next segment comes next, or the end
            row[: self.speech.end_id] = -math.inf
        earlier = [token for token in tokens if token >= first]
        if earlier:  # a segment may begin where the last one ended, but is not empty
            row[first : earlier[-1] + (not (follows_timestamp and not starts_segment))] = -math.inf
        if not tokens:
            row[:first] = -math.inf
            if self.speech.max_initial_timestamp is not None:
                row[first + self.speech.max_initial_timestamp + 1 :] = -math.inf

    def _prefer_timestamps(self, logits: Tensor) -> None:
        """Exclude all other tokens (B, V) in rows where the timestamps together are likelier than each of them."""
        first = self.first_timestamp
        logprobs = logits.float().log_softmax(dim=-1)
        timestamps, text = logprobs[:, first:].logsumexp(dim=-1), logprobs[:, :first].amax(dim=-1)
        logits[:, :first].masked_fill_((timestamps > text)[:, None], -math.inf)
