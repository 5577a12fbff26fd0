"""Checks of arguments that Model and RecurrentBaseline share.

check_prompts(["Hello"]); check_single(options); check_format("native")
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from clearhead.errors import ClearheadError, unknown_name

FolderFormat = Literal["huggingface", "native"]


def check_prompts(prompts: object) -> None:
    """Raise ClearheadError unless `prompts` is a list; each prompt is checked when it is encoded."""
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise ClearheadError(f"the prompts are {prompts!r}; give a list of prompts, or use generate for one")


def check_single(options: Mapping[str, object]) -> None:
    """Raise ClearheadError if `n` is passed to a method that returns one text."""
    if "n" in options:
        raise ClearheadError("generate and stream return one text; generate_many([prompt], n=…) returns several")


def check_format(name: str) -> None:
    """Raise ClearheadError unless a model can be saved in this format."""
    if name == "gguf":
        raise ClearheadError(
            "save writes folders, as huggingface or native; clearhead.api.save_gguf writes a GGUF file"
        )
    if name not in ("huggingface", "native"):
        raise unknown_name("format", name, ("huggingface", "native"))
