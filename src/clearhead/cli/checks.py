"""Checks of what the user gave, before torch is imported and anything is loaded, so that a typo is answered at once.

check_model_options("smollm2", "bfloat16", "cuda:1"); check_architecture("gpt2")

Only what is certainly wrong is rejected here. The functions that do the work check everything.
"""

import os
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

from clearhead.errors import ClearheadError, quote, unknown_name
from clearhead.home import expand_user

DTYPE_NAMES = ("float32", "bfloat16", "float16", "float64")  # those of clearhead.api, which imports torch
_SHORT_DTYPES = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
WEIGHTS = ("full", "stored", "int8", "int4")  # those of clearhead.checkpoint, which imports torch
_DEVICES = ("cpu", "cuda", "mps", "xpu")
COST_OPTIONS = {  # the names that clearhead.costs accepts, which imports torch
    "phase": ("train", "prefill", "decode"),
    "dtype": DTYPE_NAMES,
    "weights": ("full", "int8", "int4", "q4_0", "q4_1", "q8_0"),
    "optimizer": ("adamw", "sgd"),
    "parallel": ("ddp", "fsdp", "tp"),
    "device": ("h200", "h100", "a100", "rtx-4090", "l40s", "cpu", "cuda"),
}
MEASURABLE_DEVICES = ("cpu", "cuda")  # those of `clearhead calibrate`
_GGUF_BYTES = 1 << 16  # the architecture is described at the start of a file


def check_model(name: str, *, presets_allowed: bool = False) -> Path | None:
    """Raise ClearheadError unless `name` is an installed model, a path that looks like a model, or a Hub id.

    Return the path, or None if it is not known yet or there is none.
    """
    from clearhead.catalog import check_model_files, locate_model
    from clearhead.families import presets

    path = expand_user(name)
    if not os.path.exists(path):  # Path.exists raises OSError if the name is too long for a file
        if presets_allowed and name in presets():
            return None
        if path.parent.is_dir() and any(each.name.startswith(f".{path.name[:100]}.") for each in path.parent.iterdir()):
            return None  # an interrupted save, which loading repairs
    located = locate_model(name, presets(), config_only=presets_allowed)
    if located is not None:
        check_model_files(located)
    return located


def check_model_options(
    model: str, dtype: str | None = None, device: str | None = None, weights: str = "full"
) -> Path | None:
    """Check a model and how it is loaded; return what `check_model` returns."""
    _check_weights(weights)
    _check_precision(dtype)
    check_device(device)
    path = check_model(model)
    if weights == "stored" and path is not None and not _is_quantized(path):
        raise ClearheadError(
            f"{model} has no stored blocks, which only .gguf files and quantized folders have; "
            "use --weights int8 or int4 instead"
        )
    return path


def _is_quantized(path: Path) -> bool:
    """Return whether the weights of a model are stored in blocks: in a .gguf file, or a folder whose config says so."""
    from clearhead.files import read_json_object

    return path.suffix.lower() == ".gguf" or "quantization_config" in read_json_object(path / "config.json")


def check_architecture(model: str, dtype: str | None = None) -> None:
    """Check a model of which only the config is needed, so that it may be a preset, and a dtype."""
    _check_precision(dtype)
    check_model(model, presets_allowed=True)


def check_cost_options(model: str, names: Mapping[str, str | None], counts: Mapping[str, float | None]) -> None:
    """Check the arguments of `clearhead cost`: the model, names by option (COST_OPTIONS), and positive numbers."""
    for option, name in names.items():
        if name is not None and name not in COST_OPTIONS[option]:
            raise unknown_name(option, name, COST_OPTIONS[option])
    for option, count in counts.items():
        if count is not None and count < 1:
            raise ClearheadError(f"{option} is {count}; it must be 1 or more")
    check_architecture(model)


def check_measurable(device: str) -> None:
    """Raise ClearheadError unless `clearhead calibrate` can measure a device of this name."""
    if device not in MEASURABLE_DEVICES:
        raise ClearheadError(f"unknown device to measure {quote(device)}; use cpu, or cuda for the GPU of this machine")


def _check_precision(name: str | None) -> None:
    """Raise ClearheadError unless this is the name of a dtype, or None."""
    if name is not None and name not in DTYPE_NAMES:
        if long_name := _SHORT_DTYPES.get(name.lower()):
            raise ClearheadError(f"unknown dtype {name!r}; did you mean {long_name!r}?")
        raise unknown_name("dtype", name, DTYPE_NAMES)


def check_device(name: str | None) -> None:
    """Raise ClearheadError unless this may be the name of a device, or None. Whether it exists here is not checked."""
    if name is not None and re.sub(r":\d+$", "", name) not in _DEVICES:
        raise ClearheadError(
            f"unknown device {quote(name)}; use cuda for an NVIDIA or AMD GPU, mps for an Apple GPU, xpu for an Intel "
            "GPU, or cpu"
        )


def _check_weights(name: str) -> None:
    """Raise ClearheadError unless this is a format of weights."""
    if name not in WEIGHTS:
        raise unknown_name("weights", name, WEIGHTS)


def check_files(paths: Iterable[Path | None]) -> None:
    """Raise ClearheadError if one of these input files does not exist."""
    for path in paths:
        if path is not None and not path.is_file():
            problem = "is a folder; give a file" if path.is_dir() else "does not exist; check the path"
            raise ClearheadError(f"{path} {problem}")


def check_exists(paths: Iterable[Path], instead: str) -> None:
    """Raise ClearheadError if one of these files or folders does not exist; `instead` says what would work."""
    for path in paths:
        if not path.exists():
            raise ClearheadError(f"{path} does not exist; give {instead}")


def find_texts(paths: Iterable[Path]) -> list[Path]:
    """Return the paths, with the name of an installed data set replaced by its folder.

    Raise ClearheadError if one is neither a file nor a folder nor a data set.
    """
    from clearhead.catalog import dataset_names, find_installed

    found = []
    for path in paths:
        name = str(path)
        if path.exists() or name not in dataset_names():
            check_exists([path], "a text file, a folder of text files, or a data set from `clearhead get`")
            found.append(path)
        elif (folder := find_installed(name)) is not None:
            found.append(folder)
        else:
            raise ClearheadError(f"{name} is a data set that is not installed; run `clearhead get {name}` first")
    return found


def check_installed(packages: Iterable[str], purpose: str, extra: str) -> None:
    """Raise ClearheadError if a package of an extra of Clearhead is not installed."""
    if missing := [name for name in packages if _is_missing(name)]:
        raise ClearheadError(f'{purpose} needs {", ".join(missing)}; run: pip install "clearhead[{extra}]"')


def _is_missing(package: str) -> bool:
    try:
        return find_spec(package) is None
    except ValueError:  # its import has failed before
        return True


def check_layer(path: Path | None, layer: int | None, head: int | None) -> None:
    """Raise ClearheadError if a GGUF file has no such layer or head."""
    if path is None or path.suffix.lower() != ".gguf":
        return
    with path.open("rb") as file:
        start = file.read(_GGUF_BYTES)
    for kind, number, key in (("layer", layer, rb"\.block_count"), ("head", head, rb"\.attention\.head_count")):
        found = re.search(key + rb"\x04\0\0\0(.{4})", start, re.DOTALL)  # 4: an unsigned number of 32 bits
        count = int.from_bytes(found[1], "little") if found else None
        if count is not None and number is not None and not -count <= number < count:
            raise ClearheadError(
                f"{kind} {number} is out of range: there are {count}, from 0 to {count - 1}, or from -{count} to -1"
            )
