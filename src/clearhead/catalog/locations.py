"""Find a model by what the user gives, a path or a name, without importing torch, so that a typo is answered at once.

path = locate_model("smollm2"); check_model_files(path)
"""

import os
from collections.abc import Collection
from pathlib import Path

from clearhead.catalog.bundled import BUNDLED_MODELS
from clearhead.catalog.packages import PACKAGES, model_names
from clearhead.catalog.store import find_installed
from clearhead.errors import ClearheadError, join_choices, unknown_name
from clearhead.home import expand_user

_WHERE_MODELS_ARE_LISTED = "`clearhead list` lists models with weights, `clearhead presets` architectures without"
_FILE_EXTENSIONS = (".gguf", ".bin")  # of models that are one file
GGUF_START = b"GGUF"
# A model folder has one of them.
_MODEL_FILES = ("config.json", "clearhead.json", "model.bin", "adapter.json", "adapter_config.json")


def locate_model(model: str | Path, presets: Collection[str] = (), *, config_only: bool = False) -> Path | None:
    """Return the path of an existing file or folder, or of an installed model; None if `model` is a Hub id.

    Raise ClearheadError if it is nothing of this kind.

    presets: names of architectures without weights, which have an error message of their own.
    config_only: suggest presets, too, because only the config is needed.
    """
    path, name = expand_user(model), str(model)
    if os.path.exists(path):  # Path.exists raises OSError if the name is too long for a file
        return path
    if name.lower() in model_names():
        installed = find_installed(name)
        if installed is None:
            raise ClearheadError(f"{name} is not installed yet; fetch it with: clearhead get {name}")
        return installed
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith(".gguf"):
        return None
    if name in presets:
        raise ClearheadError(
            f"{name} is a preset, an architecture without weights; `clearhead show {name}` describes it, `clearhead "
            f"create {name}` gives it random weights, and a folder, a .gguf file or a Hub id has trained ones"
        )
    if "/" in name or os.sep in name or path.suffix in (".gguf", ".bin", ".safetensors", ".json"):
        raise ClearheadError(f"{name} does not exist; check the path")
    suggestions = set(presets if config_only else ()) | set(_main_names())
    raise unknown_name("model", name, suggestions, _WHERE_MODELS_ARE_LISTED)


def _main_names() -> list[str]:
    """Return one name of each model, without its aliases."""
    return [*(package.name for package in PACKAGES), *BUNDLED_MODELS]


def check_model_files(path: Path) -> None:
    """Raise ClearheadError if an existing path is certainly not a model. Only loading it proves that it is one."""
    if path.is_file() and path.suffix.lower() in _FILE_EXTENSIONS:
        if path.suffix.lower() == ".gguf":
            _check_gguf_start(path)
        return
    if not any((path / name).is_file() for name in _MODEL_FILES):
        raise not_a_model(path)


def _check_gguf_start(path: Path) -> None:
    """Raise ClearheadError if a file does not begin as every GGUF file does."""
    with path.open("rb") as file:
        start = file.read(len(GGUF_START))
    if start != GGUF_START:
        raise not_gguf(path, start)


def not_gguf(path: Path, start: bytes) -> ClearheadError:
    """Return the error for a file that has the extension of a GGUF file, but not its first bytes."""
    return ClearheadError(
        f"{path} is not a GGUF file: it begins with {start!r} instead of {GGUF_START!r}; download it again, or give "
        "another file"
    )


def not_a_model(path: Path) -> ClearheadError:
    """Return the error for a file or folder that is not a model."""
    if path.is_file():
        return ClearheadError(f"{path} is not a model file that can be loaded; give a folder or a .gguf file")
    if (path / "model" / "clearhead.json").is_file():
        return ClearheadError(f"{path} is the folder of a training run; its model is {path / 'model'}")
    return ClearheadError(f"{path} is not a model folder; it must contain {join_choices(_MODEL_FILES)}")
