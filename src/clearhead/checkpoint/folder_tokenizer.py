"""Find, load and save the tokenizer in a model folder, whichever files it consists of.

tokenizer = load_folder_tokenizer(Path("SmolLM2-135M"))
"""

import json
from pathlib import Path

from clearhead.architecture import LearnedPositions, ModelConfig
from clearhead.files import read_json_object, write_text
from clearhead.model import RecurrentConfig
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


def save_tokenizer(tokenizer: Tokenizer, folder: Path, config: ModelConfig | RecurrentConfig) -> None:
    """Save a tokenizer, with the inputs and the longest text of the network, so that transformers fits both."""
    tokenizer.save(folder)
    if isinstance(config, RecurrentConfig):
        return
    embedding = (config.output_stack if config.reads_audio else config.encoder or config.output_stack).token_embedding
    facts: dict[str, object] = {}
    if embedding.num_token_types > 1:
        facts["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    if isinstance(embedding.positions, LearnedPositions):
        facts["model_max_length"] = embedding.positions.num_positions
    path = folder / "tokenizer_config.json"
    if facts and path.is_file():
        write_text(path, json.dumps(read_json_object(path) | facts, indent=2))


def has_tokenizer(folder: Path) -> bool:
    """Return whether `load_folder_tokenizer` would find a tokenizer."""
    if find_marian_files(folder) is not None or has_merge_files(folder):
        return True
    return any((folder / file).is_file() for file in _TOKENIZER_FILES)
