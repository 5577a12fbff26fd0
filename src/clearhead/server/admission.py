"""Admission: how many requests the server accepts. Further ones are refused at once with 429 and Retry-After.

    with admission.request() as admitted: admitted.enter(num_texts=2, num_tokens=100)

A request counts as one from its first byte, and as its number of texts once its prompts are known. For the event loop
only.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from clearhead.server.api_errors import ApiError, invalid

_MAX_RETRY_SECONDS = 120
_RECENT_SHARE = 0.1  # weight of a new duration in the running mean


class Admission:
    """Counts texts and prompt tokens that are waiting or running."""

    def __init__(self, max_concurrent: int, max_queued: int, max_tokens: int):
        self.max_concurrent, self.max_texts, self.max_tokens = max_concurrent, max_concurrent + max_queued, max_tokens
        self.num_texts = self.num_tokens = self.num_requests = 0
        self._mean_seconds = 1.0  # duration of a text, from its admission to its end

    @contextmanager
    def request(self) -> Iterator["Admitted"]:
        """Count a request while it is answered. Raise ApiError with status 429 if there are too many."""
        if self.num_requests >= self.max_texts:
            raise self._full(f"{self.num_requests} requests are waiting or running")
        admitted = Admitted(self)
        self.num_requests += 1
        try:
            yield admitted
        finally:
            self.num_requests -= 1
            admitted.leave()

    def enter(self, num_texts: int, num_tokens: int) -> None:
        """Count texts with this many prompt tokens. Raise ApiError with status 429 if there are too many."""
        if num_texts > self.max_texts:
            raise invalid(f"the request asks for {num_texts} texts; this server takes at most {self.max_texts} at once")
        if self.num_texts + num_texts > self.max_texts:
            raise self._full(f"{self.num_texts} texts are waiting or running")
        if self.num_tokens and self.num_tokens + num_tokens > self.max_tokens:
            raise self._full(f"texts with {self.num_tokens} prompt tokens are waiting or running")
        self.num_texts += num_texts
        self.num_tokens += num_tokens

    def leave(self, num_texts: int, num_tokens: int, seconds: float) -> None:
        """Forget texts that have ended after this time."""
        self.num_texts -= num_texts
        self.num_tokens -= num_tokens
        self._mean_seconds += _RECENT_SHARE * (seconds - self._mean_seconds)

    @property
    def retry_seconds(self) -> int:
        """When a place in the queue should be free: the time in which one of the running texts ends."""
        seconds = self._mean_seconds / self.max_concurrent
        return min(max(math.ceil(seconds), 1), _MAX_RETRY_SECONDS)

    def _full(self, what: str) -> ApiError:
        message = f"{what}, and the queue is full; try again in {self.retry_seconds} s"
        headers = {"Retry-After": str(self.retry_seconds)}
        return ApiError(429, message, type="rate_limit_error", code="queue_full", headers=headers)


class Admitted:
    """The texts of one request that have been admitted."""

    def __init__(self, admission: Admission):
        self._admission = admission
        self._num_texts = self._num_tokens = 0
        self._since = 0.0

    def enter(self, num_texts: int, num_tokens: int) -> None:
        """Admit the texts of this request. Raise ApiError if there is no room for them."""
        self._admission.enter(num_texts, num_tokens)
        self._num_texts, self._num_tokens, self._since = num_texts, num_tokens, time.monotonic()

    def leave(self) -> None:
        """Give the places back. Calling it again does nothing."""
        if self._num_texts:
            self._admission.leave(self._num_texts, self._num_tokens, time.monotonic() - self._since)
        self._num_texts = self._num_tokens = 0
