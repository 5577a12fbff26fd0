"""Find stop strings in a text that arrives in pieces. This module does not import torch.

    matcher = StopStringMatcher(["END"]); matcher.push("the E")    # ("the ", False): the E may begin an END

The text ends where a stop string is first complete, however the text was split into pieces. If several stop strings
end there, the longest is removed.
"""

from collections.abc import Iterable

from clearhead.options import parse_stop_strings


class StopStringMatcher:
    """Pass on a text piece by piece, and hold back its end as long as that may become a stop string."""

    def __init__(self, stop: str | Iterable[str]):
        self.stop_strings = parse_stop_strings(stop)
        self.pending = ""  # the longest end of the text that may still become a stop string
        self.finished = False

    def push(self, piece: str, may_stop: bool = True) -> tuple[str, bool]:
        """Return the text that is now known to be output, and whether a stop string has ended it.

        With may_stop=False a stop string that this piece completes does not end the text.
        """
        if self.finished:
            return "", True
        if not self.stop_strings:
            return piece, False
        text, num_old = self.pending + piece, len(self.pending)
        starts = [(text.find(stop, max(num_old - len(stop) + 1, 0)), stop) for stop in self.stop_strings]
        matches = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if matches and may_stop:
            _, start = min(matches)
            self.pending, self.finished = "", True
            return text[:start], True
        num_pending = self.partial_match_length(text)
        self.pending = text[len(text) - num_pending :]
        return text[: len(text) - num_pending], False

    def finish(self) -> str:
        """Return the text that was held back, once no more text follows."""
        rest, self.pending = self.pending, ""
        return rest

    def partial_match_length(self, text: str) -> int:
        """Return how many of the last characters are the beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self.stop_strings), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stop_strings):
                return length
        return 0
