"""Where Clearhead keeps what it fetched, built or measured on this machine.

home() / "models"
"""

import os
from pathlib import Path


def home() -> Path:
    """$CLEARHEAD_HOME, or `clearhead` in the user's cache folder."""
    if own := os.environ.get("CLEARHEAD_HOME"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "clearhead"
