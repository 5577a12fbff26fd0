"""SIGTERM and Ctrl-C end a run between two steps, after a save; a second one ends it at once.

with Stopper() as stop:
    for step in steps:
        ...
        if stop.asked:
            save(); sys.exit(stop.exit_code)        # 143 after SIGTERM, 130 after Ctrl-C
"""

import os
import signal
import threading
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopper:
    def __init__(self) -> None:
        self.number: int | None = None
        self.former: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        return self.number is not None

    @property
    def exit_code(self) -> int:
        """As a shell reports a process that the signal ended; SIGTERM's where only another process heard one."""
        return 128 + (self.number or signal.SIGTERM)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python lets no other hear signals
            self.former = {number: signal.signal(number, self.hear) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.former.items():
            signal.signal(number, handler)

    def hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.number = number
