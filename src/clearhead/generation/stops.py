"""Stop strings, found also when several pieces of text make them up; no torch.

    watcher = StopWatcher(["END"]); watcher.push("the E")    # ("the ", False): the E may begin an END

The text ends where a stop string is first complete, however it was split into pieces; if several end there, the
longest is cut away.
"""

from collections.abc import Iterable

from clearhead.options import checked_stop


class StopWatcher:
    def __init__(self, stops: str | Iterable[str]):
        self.stops = checked_stop(stops)
        self.held = ""  # the longest end of the text that may still become a stop string
        self.finished = False

    def push(self, piece: str, early: bool = False) -> tuple[str, bool]:
        """The text that is now safe to show, and whether a stop string has ended it; what follows is dropped.

        `early`: none that this piece completes may end it.
        """
        if self.finished:
            return "", True
        text, num_old = self.held + piece, len(self.held)
        places = [(text.find(stop, max(num_old - len(stop) + 1, 0)), stop) for stop in self.stops]
        found = [(place + len(stop), place) for place, stop in places if place >= 0]
        if found and not early:
            _, start = min(found)
            self.held, self.finished = "", True
            return text[:start], True
        num_held = self.num_possible(text)
        self.held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def finish(self) -> str:
        """The text held back, once no more will come."""
        rest, self.held = self.held, ""
        return rest

    def num_possible(self, text: str) -> int:
        """How many of the last characters begin a stop string."""
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return length
        return 0
