"""Whatever a model is kept in: an installed name, a folder, a GGUF file, a hub id. One door for all.

    loaded = open_model("smollm2"); loaded.network, loaded.tokenizer

Each kind of file is read by its own strict reader; none of them runs code from the file.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from clearhead.architecture import ModelConfig
from clearhead.catalog import EXAMPLES, PACKAGES, store
from clearhead.checkpoint.ctranslate2_model import ctranslate2_config, is_ctranslate2, load_ctranslate2
from clearhead.checkpoint.fill import LoadedModel, Progress
from clearhead.checkpoint.gguf_model import gguf_config, gguf_tokenizer, load_gguf
from clearhead.checkpoint.gguf_packed import keep_blocks_of
from clearhead.checkpoint.huggingface import CONFIG, INDEX, folder_config, load_folder
from clearhead.checkpoint.llama2c import is_llama2c, llama2c_config, llama2c_tokenizer, load_llama2c
from clearhead.checkpoint.native import DESCRIPTION, load_native, native_config
from clearhead.errors import ClearheadError, unknown_name
from clearhead.families import presets
from clearhead.home import expand_user
from clearhead.tokenization import Tokenizer, load_marian, load_tokenizer, marian_files

HUB_FILE_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.spm", "*.jinja")  # no pickle, no code
LEFT_THERE = ("*/*", "consolidated*")  # other forms of the model, which may weigh as much again
ITS_CONFIG = (CONFIG, INDEX)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.model")
MODELS_ARE_LISTED = "`clearhead get` lists models with weights, `clearhead presets` architectures without"


def folder_tokenizer(folder: Path) -> Tokenizer | None:
    if marian_files(folder) is not None:
        return load_marian(folder)
    return load_tokenizer(folder) if holds_tokenizer(folder) else None


def holds_tokenizer(folder: Path) -> bool:
    return marian_files(folder) is not None or any((folder / file).is_file() for file in TOKENIZER_FILES)


@dataclass(frozen=True)
class Format:
    """One way to keep a model."""

    holds: Callable[[Path], bool]
    config: Callable[[Path], ModelConfig]  # without reading the weights
    load: Callable[[Path, torch.dtype | None, torch.device | str | None, Progress | None], LoadedModel]
    tokenizer: Callable[[Path], Tokenizer | None] = folder_tokenizer


# The first that holds a path reads it.
FORMATS = (
    Format(lambda path: path.is_file() and path.suffix.lower() == ".gguf", gguf_config, load_gguf, gguf_tokenizer),
    Format(
        lambda path: path.is_file() and path.suffix == ".bin" and is_llama2c(path),
        llama2c_config,
        load_llama2c,
        llama2c_tokenizer,
    ),
    Format(lambda path: (path / DESCRIPTION).is_file(), native_config, load_native),
    Format(is_ctranslate2, ctranslate2_config, load_ctranslate2),
    Format(lambda path: (path / CONFIG).is_file(), folder_config, load_folder),
)


def open_model(
    what: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
    *,
    keep_blocks: bool = False,
) -> LoadedModel:
    """`keep_blocks`: the quantised matrices of a .gguf file stay as they are stored."""
    path = locate(what, HUB_FILE_PATTERNS)
    kept = format_of(path)
    if keep_blocks and kept.load is not load_gguf:
        raise ClearheadError(f"{what} is not stored in blocks, only a .gguf file is; int8 or int4 pack any model")
    loaded = kept.load(path, dtype, device, progress)
    if keep_blocks:
        keep_blocks_of(path, loaded.network)
    return replace(loaded, tokenizer=kept.tokenizer(path))


def read_config(what: str | Path) -> ModelConfig:
    """What a stored model is, without reading its weights, or fetching them."""
    path = locate(what, ITS_CONFIG)
    return format_of(path).config(path)


def format_of(path: Path) -> Format:
    for kept in FORMATS:
        if kept.holds(path):
            return kept
    if path.is_file():
        raise ClearheadError(f"{path} is not a model that can be loaded; give a folder or a .gguf file")
    if (path / "model" / DESCRIPTION).is_file():
        raise ClearheadError(f"{path} is the folder of a training run; its model is {path / 'model'}")
    raise ClearheadError(f"{path} holds neither {CONFIG} nor {DESCRIPTION}: it is not a model folder")


def check_target(folder: Path, format: Literal["huggingface", "native"], tokenizer: Tokenizer | None) -> None:
    """Before a model is saved: nothing is left in the folder that would be loaded in its place, or with it."""
    if folder.exists() and not folder.is_dir():
        raise ClearheadError(f"{folder} is a file; give a folder to save in")
    kept = next((kept for kept in FORMATS if kept.holds(folder)), None)
    if kept is not None and kept.load is not {"huggingface": load_folder, "native": load_native}[format]:
        raise ClearheadError(f"{folder} holds a model in another format; give another folder")
    if tokenizer is None and holds_tokenizer(folder):
        raise ClearheadError(f"{folder} holds a tokenizer, which this model has not; give another folder")


def locate(what: str | Path, wanted: tuple[str, ...]) -> Path:
    """A path as it is; else an installed name; else the folder of a hub id, with its `wanted` files."""
    path = expand_user(what)
    if path.exists():
        return path
    name = str(what)
    folded = name.lower()
    known = {alias for package in PACKAGES for alias in (package.name, *package.aliases)} | set(EXAMPLES)
    if folded in known:
        found = store.find(folded)
        if found is None:
            raise ClearheadError(f"{name} is not on this machine yet; fetch it with: clearhead get {name}")
        return found
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith(".gguf"):
        return fetch_from_hub(name, wanted)
    if name in presets():
        raise ClearheadError(
            f"{name} is a preset, an architecture without weights: it can be shown or created, not loaded"
        )
    if len(path.parts) > 1 or path.suffix in (".gguf", ".bin", ".safetensors", ".json"):
        raise ClearheadError(f"{name} does not exist")
    architectures = presets() if wanted == ITS_CONFIG else ()
    raise unknown_name("model", name, known.union(architectures), MODELS_ARE_LISTED)


def fetch_from_hub(hub_id: str, wanted: tuple[str, ...]) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise ClearheadError(
            f'{hub_id} is neither a path nor an installed name; to load it from the hub: pip install "clearhead[hub]"'
        ) from None
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(wanted), ignore_patterns=list(LEFT_THERE)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ClearheadError(
            f"{hub_id} is no path here, and could not be fetched from the hub ({reason}); "
            "fetch it where there is a network, and give its folder"
        ) from None
