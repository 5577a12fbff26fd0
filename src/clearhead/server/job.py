"""Job: the texts of one HTTP request, from their submission to the engine to their last pieces.

    job = Job(service, plan, arrived); job.start(on_pieces); await job.wait()

The pieces are reported in the callback that delivers the engine's events, so that no task has to be woken for a token.
Closing a job aborts what is still running, within one step of the engine.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from clearhead.engine import Event, Request
from clearhead.errors import ClearheadError
from clearhead.server.api_errors import ApiError, failed, invalid, unavailable
from clearhead.server.choice import Choice, Piece
from clearhead.server.events import Arrival
from clearhead.server.service import Service, TextStream

OnPieces = Callable[[Sequence[Piece]], None]
_LOGGER = logging.getLogger("clearhead.server")
_USAGE_JSON = (
    b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'
)


@dataclass(frozen=True)
class Plan:
    """Texts to generate.

    echoes: the text of the prompt for each, if it is part of the answer. visible: special tokens that are part of the
    text, by their id.
    """

    requests: Sequence[Request]
    num_prompt_tokens: int  # in all prompts together, each counted once
    echoes: Sequence[str | None] = ()
    visible: Mapping[int, str] = field(default_factory=dict)

    @property
    def num_tokens_to_read(self) -> int:
        """Number of prompt tokens of all texts."""
        return sum(len(each.source or each.prompt) for each in self.requests)


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens."""

    num_prompt_tokens: int
    num_new_tokens: int
    num_cached_tokens: int

    def as_data(self) -> dict[str, object]:
        """Return the usage object of completions and chats."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_new_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_new_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def as_json(self) -> bytes:
        """Return `as_data` as JSON, in 0.7 us instead of 3: every event of a stream may have it."""
        total = self.num_prompt_tokens + self.num_new_tokens
        return _USAGE_JSON % (self.num_prompt_tokens, self.num_new_tokens, total, self.num_cached_tokens)


class Job:
    """Texts that are being generated for one client."""

    def __init__(self, service: Service, plan: Plan, arrived: float):
        """Prepare the texts. arrived: when the request came (time.monotonic)."""
        self._service, self._plan, self._arrived = service, plan, arrived
        echoes = plan.echoes or [None] * len(plan.requests)
        tokenizer = service.model.tokenizer
        pairs = zip(plan.requests, echoes, strict=True)
        self.choices = [
            Choice(index, request, tokenizer, echo, plan.visible) for index, (request, echo) in enumerate(pairs)
        ]
        self._unfinished = len(self.choices)
        self._streams: dict[int, TextStream] = {}  # texts that the engine has not finished, by index
        self._last_token_at: dict[int, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._on_pieces: OnPieces = lambda pieces: None
        self._has_pieces, self._has_ended = asyncio.Event(), asyncio.Event()
        self._error: Exception | None = None

    def start(self, on_pieces: OnPieces) -> None:
        """Submit all texts to the engine. on_pieces: gets what new tokens add to the texts, in the event loop."""
        metrics, post = self._service.metrics, self._service.dispatcher.post
        self._on_pieces = on_pieces
        now, seconds = time.monotonic(), self._service.settings.limits.request_seconds
        self._timer = asyncio.get_running_loop().call_later(self._arrived + seconds - now, self._expire)
        metrics.preparation_seconds.observe(now - self._arrived)
        for choice in self.choices:
            num_tokens = len(choice.request.source or choice.request.prompt)
            metrics.prompt_tokens.inc(num_tokens)
            metrics.prompt_lengths.observe(num_tokens)

            may_stop = bool(choice.request.options.stop)  # the engine would go on after a stop string

            def on_event(event: Event, index: int = choice.index, may_stop: bool = may_stop) -> None:
                is_first_or_last = event.prompt is not None or event.finish_reason is not None
                post(self, index, event, at_once=may_stop or is_first_or_last)

            try:
                self._streams[choice.index] = self._service.submit(choice.request, on_event)
            except ClearheadError:
                raise unavailable("the server is shutting down") from None

    async def wait_for_first(self) -> None:
        """Wait for the first pieces. Raise ApiError if a text has failed."""
        await self._has_pieces.wait()
        if self._error is not None:
            raise self._error

    async def wait(self) -> None:
        """Wait until all texts have finished. Raise ApiError if one of them fails."""
        await self._has_ended.wait()
        if self._error is not None:
            raise self._error

    def receive(self, arrivals: Sequence[Arrival]) -> None:
        """Report what events add to the texts, one piece for each text. An error ends the wait afterwards."""
        if self._has_ended.is_set():
            return
        arrivals_of: dict[int, list[Arrival]] = {}
        for arrival in arrivals:
            arrivals_of.setdefault(arrival[0], []).append(arrival)
        pieces: list[Piece] = []
        try:
            try:
                for index, each in arrivals_of.items():
                    self._push(index, each, pieces)
            finally:
                self._on_pieces(pieces)
        except Exception as error:
            self._end(error)
            return
        self._has_pieces.set()
        if not self._unfinished:
            self._end()

    def _push(self, index: int, arrivals: Sequence[Arrival], pieces: list[Piece]) -> None:
        """Turn the events of one text into a piece and append it to `pieces`.

        If a stop string has ended the text before, the events are ignored. Raise ApiError if the engine reports an
        error or an abort.
        """
        choice, reason = self.choices[index], arrivals[-1][1].finish_reason
        has_failed = reason in ("error", "aborted")
        if reason is not None:
            self._streams.pop(index, None)
        events = [event for _, event, _ in arrivals[: len(arrivals) - has_failed]]
        if events and choice.finish_reason is None:
            num_before = choice.num_tokens
            piece = choice.push(events)
            pieces.append(piece)
            times = [now for _, event, now in arrivals if event.token is not None]
            for now in times[: choice.num_tokens - num_before]:
                self._count_token(index, now)
            if piece.finish_reason is not None:
                self._unfinished -= 1
                self._count_end(choice, piece.finish_reason)
                if index in self._streams:  # the engine does not know stop strings
                    self._streams.pop(index).abort()
        if has_failed and choice.finish_reason is None:
            self._count_end(choice, "error" if reason == "error" else "abort")
            raise _error_of(arrivals[-1][1])

    def _expire(self) -> None:
        seconds = self._service.settings.limits.request_seconds
        message = f"the request has taken longer than {seconds:g} s; ask for fewer tokens"
        self._end(ApiError(504, message, type="timeout_error", code="timeout"))

    def _end(self, error: Exception | None = None) -> None:
        """Let those who wait go on."""
        self._error = self._error or error
        self._has_pieces.set()
        self._has_ended.set()

    @property
    def usage(self) -> Usage:
        """The tokens so far. Cached tokens are those of the first text of each prompt, at most."""
        num_new = sum(choice.num_tokens for choice in self.choices)
        num_cached = sum(choice.num_cached_tokens for choice in self.choices)
        return Usage(self._plan.num_prompt_tokens, num_new, min(num_cached, self._plan.num_prompt_tokens))

    def close(self) -> None:
        """Abort texts that have not finished, and report no more pieces."""
        self._end()
        if self._timer is not None:
            self._timer.cancel()
        for index, stream in self._streams.items():
            stream.abort()
            if self.choices[index].finish_reason is None:
                self._count_end(self.choices[index], "abort")
        self._streams.clear()

    # --- measurements

    def _count_token(self, index: int, now: float) -> None:
        metrics, last = self._service.metrics, self._last_token_at.get(index)
        if last is None:
            metrics.tokens.count_first(now - self._arrived)
        else:
            metrics.tokens.count(now - last)
        self._last_token_at[index] = now

    def _count_end(self, choice: Choice, reason: str) -> None:
        metrics = self._service.metrics
        metrics.finished.labels(reason).inc()
        metrics.request_seconds.observe(time.monotonic() - self._arrived)
        metrics.output_lengths.observe(choice.num_tokens)


def _error_of(event: Event) -> ApiError:
    """Return the error for a text that did not end normally."""
    if event.finish_reason == "aborted":
        return unavailable("the server is shutting down and has ended this request")
    if event.request_id == -1 and event.error is not None:  # refused before anything was computed
        return invalid(event.error)
    _LOGGER.error("a request failed: %s", event.error)
    return failed()
