"""Where Clearhead keeps what it fetched, built or measured on this machine.

home() / "models"
"""

import os
from pathlib import Path


def home() -> Path:
    """$CLEARHEAD_HOME, or `clearhead` in the user's cache folder."""
    if own := os.environ.get("CLEARHEAD_HOME"):
        return expand_user(own)
    return expand_user(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "clearhead"


def expand_user(path: str | Path) -> Path:
    """With the user's folder for ~; where there is no such user (~nobody), as it is."""
    return Path(os.path.expanduser(path))
