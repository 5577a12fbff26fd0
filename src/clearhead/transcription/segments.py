"""Tokens with timestamps as segments, and where the next window begins.

    segments, num_read = split_segments(tokens, first_timestamp=50364, start_frame=0, num_frames=3000)

A window usually ends inside a sentence. What follows its last pair of timestamps is therefore left out, and the next
window begins there. If the text ends with a single timestamp, nothing is said after it, and the window is read whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from clearhead.audio import FRAMES_PER_SECOND

_FRAMES_PER_STEP = 2  # timestamps are steps of 0.02 seconds


@dataclass(frozen=True)
class TokenSegment:
    """A part of a recording and its tokens, timestamps included."""

    start: float  # seconds
    end: float
    tokens: tuple[int, ...]


def split_segments(
    tokens: Sequence[int], *, first_timestamp: int, start_frame: int, num_frames: int
) -> tuple[list[TokenSegment], int]:
    """Return the segments of a window that begins at `start_frame`, and how many of its frames they cover."""

    def seconds(step: int) -> float:
        return (start_frame + step * _FRAMES_PER_STEP) / FRAMES_PER_SECOND

    is_time = [token >= first_timestamp for token in tokens]
    pairs = [place for place in range(1, len(tokens)) if is_time[place - 1] and is_time[place]]
    if not pairs:
        times = [token - first_timestamp for token in tokens if token >= first_timestamp]
        last = times[-1] if times and times[-1] > 0 else num_frames // _FRAMES_PER_STEP
        return [TokenSegment(seconds(0), seconds(last), tuple(tokens))], num_frames
    is_complete = is_time[-2:] == [False, True]
    ends = [*pairs, len(tokens)] if is_complete else pairs
    segments = []
    for first, end in zip([0, *ends], ends, strict=False):
        part = tuple(tokens[first:end])
        start, stop = part[0] - first_timestamp, part[-1] - first_timestamp
        segments.append(TokenSegment(seconds(start), seconds(stop), part))
    last = tokens[ends[-1] - 1] - first_timestamp
    return segments, num_frames if is_complete or last == 0 else last * _FRAMES_PER_STEP
