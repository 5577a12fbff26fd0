"""Recognize the format of a checkpoint, and load it with the reader of that format.

    loaded = open_model("smollm2"); loaded.network, loaded.tokenizer

The formats are GGUF, llama2.c, Clearhead's own folders, CTranslate2 and Hugging Face folders. No reader runs code from
a checkpoint.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clearhead.architecture import ModelConfig
from clearhead.catalog import not_a_model
from clearhead.checkpoint.adapter import is_adapter, read_adapter
from clearhead.checkpoint.ctranslate2_model import is_ctranslate2, load_ctranslate2, read_ctranslate2_config
from clearhead.checkpoint.folder_tokenizer import has_tokenizer
from clearhead.checkpoint.gguf_model import load_gguf, read_gguf_config
from clearhead.checkpoint.huggingface import CONFIG_FILE, load_folder, read_folder_config
from clearhead.checkpoint.interface import DEFAULT_OPTIONS, LoadOptions, ModelParts
from clearhead.checkpoint.llama2c import is_llama2c, load_llama2c, read_llama2c_config
from clearhead.checkpoint.locations import resolve_path
from clearhead.checkpoint.native import DESCRIPTION_FILE, load_native, read_native_config
from clearhead.checkpoint.peft_adapter import is_peft_adapter, read_peft_adapter
from clearhead.checkpoint.replacement import check_complete, restore_previous
from clearhead.checkpoint.sentence_folder import network_folder
from clearhead.errors import ClearheadError
from clearhead.files import check_path_length
from clearhead.tokenization import Tokenizer


@dataclass(frozen=True)
class Format:
    """A checkpoint format and its reader."""

    matches: Callable[[Path], bool]
    read_config: Callable[[Path], ModelConfig]  # without reading the weights
    load: Callable[[Path, LoadOptions], ModelParts]


# The first format that matches a path is used.
FORMATS = (
    Format(lambda path: path.is_file() and path.suffix.lower() == ".gguf", read_gguf_config, load_gguf),
    Format(
        lambda path: path.is_file() and path.suffix == ".bin" and is_llama2c(path), read_llama2c_config, load_llama2c
    ),
    Format(lambda path: (path / DESCRIPTION_FILE).is_file(), read_native_config, load_native),
    Format(is_ctranslate2, read_ctranslate2_config, load_ctranslate2),
    Format(lambda path: (network_folder(path) / CONFIG_FILE).is_file(), read_folder_config, load_folder),
)


def open_model(model: str | Path, options: LoadOptions = DEFAULT_OPTIONS) -> ModelParts:
    """Load a model from a path, the name of an installed model or a hub id."""
    path = resolve_path(model)
    format = format_of(path)
    if options.weights == "stored" and format.load not in (load_gguf, load_folder):
        raise ClearheadError(
            f"{model} has no stored blocks, which only .gguf files and quantized folders have; "
            "use weights='int8' or 'int4' instead"
        )
    identity = _identity(path)
    loaded = format.load(path, options)
    if _identity(path) != identity:
        raise ClearheadError(f"{path} was replaced by another model while it was loaded; load it again")
    return loaded


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what tells a file or folder from another one with the same name."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def read_config(model: str | Path) -> ModelConfig:
    """Return the config of a model without reading its weights. From the hub, only its config is fetched."""
    if is_adapter(model):
        model = read_adapter(model).base
    if is_peft_adapter(model):
        model = read_peft_adapter(model).base
    path = resolve_path(model, config_only=True)
    return format_of(path).read_config(path)


def format_of(path: Path) -> Format:
    """Return the format of a file or folder; raise ClearheadError if it is not a model."""
    check_complete(path)
    for format in FORMATS:
        if format.matches(path):
            return format
    raise not_a_model(path)


def check_save_folder(folder: Path, format: Literal["huggingface", "native"], tokenizer: Tokenizer | None) -> None:
    """Raise ClearheadError if a model cannot be saved in a folder.

    The folder must not contain a model of another format, or a tokenizer if the model has none: both would be loaded
    instead of, or together with, the saved model.
    """
    check_path_length(folder)
    restore_previous(folder.absolute())
    if folder.exists() and not folder.is_dir():
        raise ClearheadError(f"{folder} is a file; give a folder")
    existing = next((known for known in FORMATS if known.matches(folder)), None)
    if existing is not None and existing.load is not {"huggingface": load_folder, "native": load_native}[format]:
        raise ClearheadError(f"{folder} contains a model in another format; give another folder")
    if tokenizer is None and has_tokenizer(folder):
        raise ClearheadError(f"{folder} contains a tokenizer, but this model has none; give another folder")
