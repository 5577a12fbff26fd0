"""SequentialWorker: the interface of EngineWorker for models that the engine cannot run, one text after another.

    worker = SequentialWorker(model.text_generator); stream = worker.submit(request, on_event)

Models with dynamically scaled rotations need it: their rotations depend on the length of the whole text.
"""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event as Flag
from threading import Thread

from clearhead.engine import EngineStatistics, Event, PromptReport, Request
from clearhead.errors import ClearheadError
from clearhead.generation import TextGenerator, TokenSequence

OnEvent = Callable[[Event], None]


class SequentialStream:
    """A request that was submitted."""

    def __init__(self) -> None:
        self._aborted = Flag()

    def abort(self) -> None:
        """End the request after the current step."""
        self._aborted.set()

    @property
    def is_aborted(self) -> bool:
        """Whether the request is to end."""
        return self._aborted.is_set()


class SequentialWorker:
    """A thread that generates one text at a time with the decode loop."""

    def __init__(self, text_generator: TextGenerator, after_event: Callable[[], object] = lambda: None):
        """Start the thread. after_event: is called in it when an event has been reported."""
        self._text_generator, self._after_event = text_generator, after_event
        self._waiting: SimpleQueue[tuple[Request, OnEvent, SequentialStream] | None] = SimpleQueue()
        self._closing = Flag()
        self._is_running = False
        self._num_prompt_tokens = self._num_generated_tokens = 0
        self._thread = Thread(target=self._work, name="clearhead-texts", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_event: OnEvent) -> SequentialStream:
        """Queue a request; its events are reported in the worker's thread."""
        if self._closing.is_set():
            raise ClearheadError("this worker has been closed; start a new one")
        stream = SequentialStream()
        self._waiting.put((request, on_event, stream))
        return stream

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    @property
    def statistics(self) -> EngineStatistics:
        """How busy the worker is; it has no pages."""
        nothing = EngineStatistics(*[0] * len(EngineStatistics._fields))
        return nothing._replace(
            num_running=int(self._is_running),
            num_waiting=self._waiting.qsize(),
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
        )

    def close(self) -> None:
        """Abort all requests and end the thread."""
        self._closing.set()
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            self._is_running = True
            try:
                self._generate(*item)
            except ClearheadError as error:  # refused, as by the engine
                self._tell(item[1], Event(-1, finish_reason="error", error=str(error)))
            except Exception as error:
                self._tell(item[1], Event(0, finish_reason="error", error=f"{type(error).__name__}: {error}"))
            finally:
                self._is_running = False

    def _generate(self, request: Request, on_event: OnEvent, stream: SequentialStream) -> None:
        """Generate one text and report its tokens."""
        if request.prompt_logprobs is not None or request.token_filter is not None:
            message = "this model runs without the engine, so it supports neither echoed log-probabilities nor formats"
            raise ClearheadError(f"{message}; leave them out")
        sequence = TokenSequence(request.prompt, request.options.with_seed(), source=request.source)
        steps = self._text_generator.start_decoding([sequence])
        self._num_prompt_tokens += len(request.prompt)
        report: PromptReport | None = PromptReport(0)
        if request.options.max_new_tokens == 0:
            self._tell(on_event, Event(0, finish_reason="length", prompt=report))
            return
        for _ in steps:
            if stream.is_aborted or self._closing.is_set():
                self._tell(on_event, Event(0, finish_reason="aborted"))
                return
            reason = sequence.finish_reason if sequence.finished else None
            reason = None if reason == "unfinished" else reason
            logprobs = sequence.logprobs[-1] if sequence.logprobs else None
            self._num_generated_tokens += 1
            event = Event(0, sequence.tokens[-1], logprobs, reason, prompt=report)
            if not self._tell(on_event, event) or reason is not None:
                return
            report = None

    def _tell(self, on_event: OnEvent, event: Event) -> bool:
        """Report an event and return whether that worked."""
        try:
            on_event(event)
            self._after_event()
        except Exception:
            return False
        return True
