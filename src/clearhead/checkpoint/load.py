"""Whatever a model is kept in: an installed name, a folder, a GGUF file, a hub id. One door for all.

    opened = open_model("smollm2"); opened.loaded.network, opened.tokenizer

Each kind of file is read by its own strict reader; none of them runs code from the file.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from clearhead.checkpoint import native, store
from clearhead.checkpoint.ctranslate2_model import ctranslate2_config, is_ctranslate2, load_ctranslate2
from clearhead.checkpoint.fill import Progress, fill
from clearhead.checkpoint.gguf import open_gguf
from clearhead.checkpoint.gguf_model import gguf_config, load_gguf
from clearhead.checkpoint.huggingface import Loaded, folder_config, load_folder, safetensors_of
from clearhead.checkpoint.llama2c import Llama2cCheckpoint, open_llama2c
from clearhead.checkpoint.packages import PACKAGES
from clearhead.errors import ClearheadError, unknown
from clearhead.families import llama, presets
from clearhead.model.config import ModelConfig
from clearhead.model.parts import Rope
from clearhead.tokenization.base import Tokenizer
from clearhead.tokenization.gguf_vocabulary import from_gguf
from clearhead.tokenization.load import load_tokenizer
from clearhead.tokenization.marian import load_marian, marian_files


@dataclass(frozen=True)
class Opened:
    loaded: Loaded
    tokenizer: Tokenizer | None
    path: Path


def open_model(
    what: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> Opened:
    path = locate(what)
    if path.is_file() and path.suffix == ".gguf":
        loaded = load_gguf(path, dtype, device, progress)
        with open_gguf(path) as file:
            return Opened(loaded, from_gguf(file.metadata), path)
    if path.is_file() and path.suffix == ".bin" and is_llama2c(path):
        vocabulary = path.with_name("tokenizer.bin")
        tokenizer = load_tokenizer(vocabulary) if vocabulary.is_file() else None
        return Opened(load_llama2c(path, dtype, device, progress), tokenizer, path)
    if (path / native.DESCRIPTION).is_file():
        loaded = native.load_native(path, dtype, device, progress)
    elif is_ctranslate2(path):
        loaded = load_ctranslate2(path, dtype, device, progress)
    elif (path / "config.json").is_file():
        loaded = load_folder(path, dtype, device, progress)
    else:
        raise not_a_model(path)
    return Opened(loaded, folder_tokenizer(path), path)


def read_config(what: str | Path) -> ModelConfig:
    """What a stored model is, without reading its weights."""
    path = locate(what)
    if path.is_file() and path.suffix == ".gguf":
        with open_gguf(path) as file:
            return gguf_config(file)
    if path.is_file() and path.suffix == ".bin" and is_llama2c(path):
        return llama2c_config(open_llama2c(path))
    if (path / native.DESCRIPTION).is_file():
        return native.read_description(path)[0]
    if is_ctranslate2(path):
        return ctranslate2_config(path)
    if (path / "config.json").is_file():
        return folder_config(path, safetensors_of(path))[0]
    raise not_a_model(path)


def not_a_model(path: Path) -> ClearheadError:
    if path.is_file():
        return ClearheadError(f"{path} is not a model that can be loaded; give a folder or a .gguf file")
    return ClearheadError(f"{path} holds neither config.json nor {native.DESCRIPTION}: it is not a model folder")


def locate(what: str | Path) -> Path:
    """A path as it is; else an installed name; else the folder of a hub id."""
    path = Path(what).expanduser()
    if path.exists():
        return path
    name = str(what)
    folded = name.lower()
    known = {alias for package in PACKAGES for alias in (package.name, *package.aliases)}
    if folded in known:
        found = store.find(folded)
        if found is None:
            raise ClearheadError(f"{name} is not on this machine yet; fetch it with: clearhead get {name}")
        return found
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith(".gguf"):
        return fetch_from_hub(name)
    if name in presets():
        raise ClearheadError(f"{name} is a preset, an architecture without weights; build it with clearhead.create")
    if len(path.parts) > 1 or path.suffix in (".gguf", ".bin", ".safetensors", ".json"):
        raise ClearheadError(f"{name} does not exist")
    raise unknown("model", name, known | set(presets()))


def fetch_from_hub(hub_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise ClearheadError(
            f"{hub_id} is neither a path nor an installed name; to load it from the hub: pip install clearhead[hub]"
        ) from None
    wanted = ["*.json", "*.safetensors", "*.model", "*.spm", "*.jinja"]  # no pickle, no code
    try:
        return Path(snapshot_download(hub_id, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ClearheadError(
            f"{hub_id} could not be fetched from the hub ({reason}); fetch it where there is a network, give its folder"
        ) from None


def folder_tokenizer(folder: Path) -> Tokenizer | None:
    if marian_files(folder) is not None:
        return load_marian(folder)
    files = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.model")
    if not any((folder / file).is_file() for file in files):
        return None
    return load_tokenizer(folder)


def is_llama2c(path: Path) -> bool:
    try:
        open_llama2c(path)
    except ClearheadError:
        return False
    return True


class Llama2cSource:
    def __init__(self, path: Path, checkpoint: Llama2cCheckpoint):
        self.where, self.checkpoint = str(path), checkpoint

    def names(self) -> list[str]:
        return list(self.checkpoint.tensors)

    def read(self, name: str) -> torch.Tensor:
        return self.checkpoint.tensors[name]


def load_llama2c(
    path: Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> Loaded:
    checkpoint = open_llama2c(path)
    source = Llama2cSource(path, checkpoint)
    config = llama2c_config(checkpoint)
    network = fill(config, source, names=llama.META_NAMES, dtype=dtype, device=device, progress=progress)
    return Loaded(network, llama.FAMILY, {"bos_token_id": 1, "eos_token_id": 2})


def llama2c_config(checkpoint: Llama2cCheckpoint) -> ModelConfig:
    header = checkpoint.header
    return llama.llama(
        width=header.width,
        num_layers=header.num_layers,
        num_heads=header.num_heads,
        num_kv_heads=header.num_kv_heads,
        feed_forward=header.feed_forward_width,
        vocab_size=header.vocab_size,
        context=header.context_length,
        rope=Rope(),
        tied=header.tied,
    )
