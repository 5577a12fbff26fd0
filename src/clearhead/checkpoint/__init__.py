"""Models on disk: every reader and writer of weights, each strict about its file.

loaded = clearhead.checkpoint.load.open_model("smollm2")
"""

from clearhead.checkpoint.fill import (
    LoadedModel,
    Progress,
)
from clearhead.checkpoint.huggingface import (
    CONFIG,
    save_folder,
)
from clearhead.checkpoint.load import (
    HUB_FILE_PATTERNS,
    check_target,
    folder_tokenizer,
    locate,
    open_model,
    read_config,
)
from clearhead.checkpoint.native import (
    save_native,
)
from clearhead.checkpoint.recurrent import (
    is_recurrent,
    load_recurrent,
)

__all__ = [
    "CONFIG",
    "HUB_FILE_PATTERNS",
    "LoadedModel",
    "Progress",
    "check_target",
    "folder_tokenizer",
    "is_recurrent",
    "load_recurrent",
    "locate",
    "open_model",
    "read_config",
    "save_folder",
    "save_native",
]
