"""The folder in which Clearhead keeps downloads, built kernels and measurements of this machine.

models = home() / "models"
"""

import os
from pathlib import Path


def home() -> Path:
    """Return $CLEARHEAD_HOME, or the folder `clearhead` in the user's cache folder."""
    if configured := os.environ.get("CLEARHEAD_HOME"):
        return expand_user(configured)
    return expand_user(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "clearhead"


def expand_user(path: str | Path) -> Path:
    """Replace a leading ~ by the user's home folder. Return the path unchanged if there is no such user (~nobody).

    Path.expanduser would raise RuntimeError in that case.
    """
    return Path(os.path.expanduser(path))
