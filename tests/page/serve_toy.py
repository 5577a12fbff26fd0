"""Serve a small model of bytes with a hostile token on a free port, for tests in a browser.

python -m tests.page.serve_toy RUNS    # prints the address on the first line
"""

import sys
from pathlib import Path

from clearhead.server import ServerSettings, run_server
from tests.page.models import hostile_model


def main() -> None:
    """Serve until a signal arrives."""
    settings = ServerSettings(port=0, runs=Path(sys.argv[1]))
    sys.exit(run_server(hostile_model, "toy", settings, lambda line: print(line, flush=True)))


if __name__ == "__main__":
    main()
