"""The chat in a terminal: read messages, stream the answers and report their speed.

    run_chat(model.chat(), {"max_new_tokens": 256})

Answers go to stdout and everything else to stderr, so that the answers can be piped.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.cli.app import print_message
from clearhead.cli.chat_input import keep_keys
from clearhead.cli.word_wrap import TextPrinter
from clearhead.errors import ClearheadError
from clearhead.terminal import TerminalConsole, is_terminal

if TYPE_CHECKING:
    from clearhead.api import Chat


@dataclass(frozen=True)
class AnswerSpeed:
    """How long an answer took."""

    num_tokens: int
    num_prompt_tokens: int
    elapsed_seconds: float
    first_seconds: float  # until the first token

    @property
    def tokens_per_second(self) -> float:
        """The speed, including the time to read the prompt."""
        return self.num_tokens / max(self.elapsed_seconds, 1e-9)


@dataclass
class ChatSession:
    """A chat, its sampling options, and what the commands need to know about it."""

    chat: "Chat"
    options: dict[str, Any]
    speeds: list[AnswerSpeed] = field(default_factory=list)
    file: Path | None = None  # where the conversation was loaded from or saved to

    def __post_init__(self) -> None:
        # On a terminal, whole words are wrapped; elsewhere, a line stays a line.
        self.console = TerminalConsole(stderr=True, soft_wrap=not is_terminal(sys.stderr))

    def note(self, text: str) -> None:
        """Print text to stderr, dim."""
        self.console.print(text, style="dim", markup=False)

    def answer(self, start: Callable[..., Generator[str, None, None]]) -> None:
        """Stream an answer to stdout and print its statistics, or an error, to stderr.

        start: returns the pieces of the answer; it is called with the sampling options.
        """
        started = time.perf_counter()
        first_seconds, was_interrupted = 0.0, False
        printer = TextPrinter(sys.stdout)
        try:
            with keep_keys(), _stop_on_interrupt() as stop, closing(start(**self.options)) as pieces:
                for piece in pieces:
                    stop.has_text = True
                    first_seconds = first_seconds or time.perf_counter() - started
                    printer.write(piece)
                    if stop.requested:
                        break
        except KeyboardInterrupt:
            was_interrupted = True  # the text so far stays in the conversation
        except ClearheadError as error:
            print_message("error", str(error))
            return
        printer.finish()
        if was_interrupted and not first_seconds:
            self.note("Stopped before the first token; the conversation is as it was before.")
        elif self.chat.last_generation is not None:
            elapsed_seconds = time.perf_counter() - started
            num_tokens = len(self.chat.last_generation.tokens)
            speed = AnswerSpeed(num_tokens, self.chat.num_prompt_tokens, elapsed_seconds, first_seconds)
            self.speeds.append(speed)
            self.note(_describe_answer(self.chat, speed))


@dataclass
class _Stop:
    """Whether Ctrl-C was pressed, and whether there is text that it must not lose."""

    requested: bool = False
    has_text: bool = False


@contextmanager
def _stop_on_interrupt() -> Iterator[_Stop]:
    """Let the first Ctrl-C in an answer request a stop after the present token, so that the cache stays complete.

    Before the first token, and the second time, Ctrl-C raises KeyboardInterrupt.
    """
    stop = _Stop()

    def request(number: int, frame: object) -> None:
        if stop.requested or not stop.has_text:
            raise KeyboardInterrupt
        stop.requested = True

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set a handler
        yield stop
        return
    before = signal.signal(signal.SIGINT, request)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _describe_answer(chat: "Chat", speed: AnswerSpeed) -> str:
    """Return one line on the speed and the cache, and a second one if the context is full."""
    generation, context = chat.last_generation, chat.text_generator.network.config.context
    assert generation is not None
    text = (
        f"{speed.num_tokens} tokens, {speed.tokens_per_second:.1f} per second; "
        f"{speed.num_prompt_tokens} prompt tokens read, {chat.cache.length} tokens in the cache"
    )
    if generation.num_past_context:
        text += f"\nThe conversation is longer than the model's context of {context:,} tokens; /reset starts a new one."
    elif generation.finish_reason == "context":
        text += f"\nThe model's context of {context:,} tokens is full; /reset starts a new conversation."
    elif generation.finish_reason == "length":
        text += "; cut off at max_new_tokens"
    return text
