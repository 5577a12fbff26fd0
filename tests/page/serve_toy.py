"""Serve a small model of bytes with a hostile token on a free port, for tests in a browser.

python -m tests.page.serve_toy RUNS    # prints the address on the first line
"""

import sys
import time
from pathlib import Path

from clearhead.engine import Engine
from clearhead.server import ServerSettings, run_server
from tests.page.models import hostile_model


def slow_down(engine_step):
    """Return a step that takes some milliseconds, as one of a real model does, so that an answer can be stopped."""

    def step(engine):
        time.sleep(0.005)
        return engine_step(engine)

    return step


def main() -> None:
    """Serve until a signal arrives."""
    Engine.step = slow_down(Engine.step)
    settings = ServerSettings(port=0, runs=Path(sys.argv[1]))
    sys.exit(run_server(hostile_model, "toy", settings, lambda line: print(line, flush=True)))


if __name__ == "__main__":
    main()
