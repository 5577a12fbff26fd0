"""Stop a run between two steps on SIGTERM or Ctrl-C, so that it can save first. A second signal ends it at once.

with StopSignals() as stop:
    for step in steps:
        ...
        if stop.requested:
            save(); sys.exit(stop.exit_code)        # 143 after SIGTERM, 130 after Ctrl-C
"""

import os
import signal
import threading
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Catches SIGTERM and SIGINT inside a `with` block."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.previous_handlers: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has been received."""
        return self.received is not None

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports for the signal; that of SIGTERM if only another process received one."""
        return 128 + (self.received or signal.SIGTERM)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers in no other thread
            self.previous_handlers = {number: signal.signal(number, self.handle) for number in _SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Record the first signal. On the second, restore the default action and send the signal again."""
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = number
