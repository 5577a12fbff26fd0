"""Hugging Face folders, both ways: config.json and one or several safetensors files.

    loaded = load_folder(path); save_folder(loaded.network, other_path, loaded.family)

Only safetensors are read: a pickle is never opened, whatever it is called.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from clearhead.checkpoint.fill import Progress, fill, slots
from clearhead.errors import ClearheadError
from clearhead.families import family_for, family_of_type
from clearhead.families.family import Family
from clearhead.families.names import Row, expand, parse_target
from clearhead.families.settings import Settings
from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer

LARGEST_JSON_BYTES = 64 * 2**20
SHARD_BYTES = 5 * 10**9  # the shard size the Hub's own tools write


@dataclass(frozen=True)
class Loaded:
    network: Transformer
    family: Family | None
    special_ids: dict[str, Any] = field(default_factory=dict)


def read_json(path: Path) -> Any:
    if not path.is_file():
        raise ClearheadError(f"{path} does not exist")
    if path.stat().st_size > LARGEST_JSON_BYTES:
        raise ClearheadError(f"{path} has {path.stat().st_size} bytes; no such file needs over {LARGEST_JSON_BYTES}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ClearheadError(f"{path} is not valid JSON: {error}") from None


# --- reading


def load_folder(
    folder: Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> Loaded:
    source = safetensors_of(folder)
    config, family, special_ids = folder_config(folder, source)
    network = fill(
        config,
        source,
        names=family.names,
        prefix=family.prefix,
        older_endings=family.older_endings,
        copies=family.copies,
        dropped=family.dropped,
        dtype=dtype,
        device=device,
        progress=progress,
    )
    return Loaded(network, family, special_ids)


def folder_config(folder: Path, source: "SafetensorsFiles") -> tuple[ModelConfig, Family, dict[str, Any]]:
    """What config.json says, settled by the names of the tensors; their values are not read."""
    settings = Settings(read_json(folder / "config.json"), str(folder / "config.json"))
    special_ids = settings.special_ids()
    if settings.table("text_config").data:
        settings = settings.table("text_config")  # the language half of a model that also sees
    family = family_of_type(settings.text("model_type"))
    assert family.read is not None
    return family.settle(family.read(settings), set(source.names())), family, special_ids


def safetensors_of(folder: Path) -> "SafetensorsFiles":
    return SafetensorsFiles(folder, [folder / name for name in shard_names(folder)])


class SafetensorsFiles:
    """The tensors of one or several files, whichever file each is in; read one at a time."""

    def __init__(self, where: Path, paths: list[Path]):
        self.where = str(where)
        self.holders: dict[str, Any] = {}  # tensor name -> its open file
        for path in paths:
            opened = open_safetensors(path)
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                if name in self.holders:
                    raise ClearheadError(f"{where}: the tensor {name} stands in two files")
                self.holders[name] = opened

    def names(self) -> Iterator[str]:
        return (name for name in self.holders if name.removesuffix("_scale_inv") == name or not self.scales(name))

    def scales(self, name: str) -> bool:
        """Whether this tensor is the scale of a float8 one."""
        holder = self.holders.get(name.removesuffix("_scale_inv"))
        return holder is not None and holder.get_slice(name.removesuffix("_scale_inv")).get_dtype() == "F8_E4M3"

    def read(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self.holders[name].get_tensor(name)
            if tensor.dtype == torch.float8_e4m3fn and f"{name}_scale_inv" in self.holders:
                return dequantize_float8(tensor, self.read(f"{name}_scale_inv"))
        except (SafetensorError, RuntimeError) as error:
            raise ClearheadError(f"{self.where}: the tensor {name} cannot be read: {error}") from None
        return tensor


def dequantize_float8(tensor: Tensor, scale: Tensor) -> Tensor:
    """Blocks of 128 x 128 with one scale each (DeepSeek-V3, §3.3.2)."""
    rows, columns = tensor.shape
    blocks = (-(-rows // 128), -(-columns // 128))
    if scale.shape != blocks:
        raise RuntimeError(f"scales {tuple(scale.shape)} for {blocks} blocks of 128 x 128")
    spread = scale.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return (tensor.float() * spread).to(torch.bfloat16)


def open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ClearheadError(f"{path} is not a whole safetensors file: {error}") from None


def shard_names(folder: Path) -> list[str]:
    """The safetensors files of a folder, by its index where it has one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        if (folder / "model.safetensors").exists():
            return ["model.safetensors"]
        pickles = [path.name for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl") for path in folder.glob(kind)]
        only = f"; it holds only {pickles[0]}, a pickle, which is never opened" if pickles else ""
        raise ClearheadError(f"{folder} has no model.safetensors{only}; convert the model to safetensors first")
    places = Settings(read_json(index), str(index)).table("weight_map").data
    names = {str(name) for name in places.values()}
    for name in sorted(names):
        if not re.fullmatch(r"[\w.-]+\.safetensors", name) or ".." in name:
            raise ClearheadError(f"{index} names the file {name!r}; only safetensors files beside it are read")
        if not (folder / name).is_file():
            raise ClearheadError(f"{folder} lacks {name}, which its index names")
    return sorted(names)


# --- writing


def save_folder(
    network: Transformer,
    folder: Path,
    family: Family | None = None,
    special_ids: dict[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Family:
    """Write config.json and the weights so that transformers loads them; returns the family whose words were used."""
    family = family or family_for(network.config)
    if family.write is None:
        raise ClearheadError(f"the {family.name} family has no Hugging Face form; save it as native instead")
    own = slots(network)
    rows = dict(expand(family.names, network.config, set(own)))
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(next(iter(own.values())).dtype).removeprefix("torch.")
    config = family.write(network.config) | {"dtype": dtype} | (special_ids or {})
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    write_shards(folder, rows, own, network, shard_bytes)
    return family


def foreign_tensor(row: Row, own: dict[str, Tensor], network: Transformer) -> Tensor:
    parts = []
    for target in row.own:
        name, index = parse_target(target)
        part = own[name].detach()
        parts.append(part if index is None else part[index])
    # A view of a larger tensor, or of one stored elsewhere, would be written whole.
    return row.join(parts, network.config).clone(memory_format=torch.contiguous_format).cpu()


def write_shards(
    folder: Path, rows: dict[str, Row], own: dict[str, Tensor], network: Transformer, shard_bytes: int
) -> None:
    shards: list[list[str]] = [[]]
    sizes, total = 0, 0
    for name, row in rows.items():
        num_bytes = sum(own_bytes(target, own) for target in row.own)
        if sizes + num_bytes > shard_bytes and shards[-1]:
            shards.append([])
            sizes = 0
        shards[-1].append(name)
        sizes, total = sizes + num_bytes, total + num_bytes
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors = {name: foreign_tensor(rows[name], own, network) for name in names}
        write_tensors(folder / file, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = folder / "model.safetensors.index.json"
    if len(shards) > 1:
        write_text(index, json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")
    else:
        index.unlink(missing_ok=True)
    for stale in {*folder.glob("model-*-of-*.safetensors"), *folder.glob("model.safetensors")}:
        if stale.name not in weight_map.values():
            stale.unlink()  # of an earlier save: readers would take it for the model


def own_bytes(target: str, own: dict[str, Tensor]) -> int:
    name, index = parse_target(target)
    num_bytes = own[name].numel() * own[name].element_size()
    return num_bytes if index is None else num_bytes // len(own[name])


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """All of it or nothing, and readable by whoever may read the folder's other files."""
    partial = path.with_name(path.name + ".partial")
    partial.touch()
    mode = partial.stat().st_mode
    save_file(tensors, partial, metadata=metadata)
    partial.chmod(mode)
    os.replace(partial, path)


def write_text(path: Path, text: str) -> None:
    """All of it or nothing."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
