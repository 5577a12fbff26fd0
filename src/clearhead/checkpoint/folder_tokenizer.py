"""Find and load the tokenizer in a model folder, whichever files it consists of.

tokenizer = load_folder_tokenizer(Path("SmolLM2-135M"))
"""

from pathlib import Path

from clearhead.tokenization import (
    Tokenizer,
    find_marian_files,
    has_merge_files,
    load_marian_tokenizer,
    load_tokenizer,
)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.model")


def load_folder_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer in a folder, or None if there is none."""
    if find_marian_files(folder) is not None:
        return load_marian_tokenizer(folder)
    return load_tokenizer(folder) if has_tokenizer(folder) else None


def has_tokenizer(folder: Path) -> bool:
    """Return whether `load_folder_tokenizer` would find a tokenizer."""
    if find_marian_files(folder) is not None or has_merge_files(folder):
        return True
    return any((folder / file).is_file() for file in _TOKENIZER_FILES)
