"""Hugging Face folders, both ways: config.json and one or several safetensors files.

    loaded = load_folder(path); save_folder(loaded.network, other_path, loaded.family)

Only safetensors are read: a pickle is never opened, whatever it is called.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.architecture import ModelConfig
from clearhead.checkpoint.fill import LoadedModel, Progress, fill, slots
from clearhead.checkpoint.tensors import read_safetensors
from clearhead.errors import ClearheadError
from clearhead.families import Family, Row, Settings, expand, family_for, family_of_type, parse_target
from clearhead.files import read_json, read_object, write_safetensors, write_text
from clearhead.model import Transformer

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
SHARD_BYTES = 5 * 10**9  # the shard size the Hub's own tools write


# --- reading


def load_folder(
    folder: Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    settings = read_settings(folder)
    family = family_of_type(language_half(settings).text("model_type"))
    tensors = read_safetensors([folder / name for name in shard_names(folder)], str(folder))
    with told_of_packing(settings):
        network = fill(
            settled(family, settings, set(tensors)),
            tensors,
            where=str(folder),
            names=family.names,
            prefix=family.prefix,
            older_endings=family.older_endings,
            copies=family.copies,
            dropped=family.dropped,
            dtype=dtype,
            device=device,
            progress=progress,
        )
    return LoadedModel(network, family=family, special_ids=special_ids_of(folder, settings))


@contextmanager
def told_of_packing(settings: Settings) -> Iterator[None]:
    """A config may still name a packing that its weights no longer have, so that alone is no error."""
    try:
        yield
    except ClearheadError as error:
        method = settings.table("quantization_config").data.get("quant_method")
        if method is None:
            raise
        raise ClearheadError(
            f"{error}; config.json says that the weights are packed ({method}): take the model in full, or as .gguf"
        ) from None


def folder_config(folder: Path) -> ModelConfig:
    """What config.json says, settled by the names of the tensors; where there are none yet, as it says."""
    settings = read_settings(folder)
    family = family_of_type(language_half(settings).text("model_type"))
    if (folder / INDEX).exists():
        return settled(family, settings, set(weight_map(folder)))
    if (folder / WEIGHTS).exists():
        return settled(family, settings, set(read_safetensors([folder / WEIGHTS], str(folder))))
    return settled(family, settings, None)


def read_settings(folder: Path) -> Settings:
    return Settings(read_json(folder / CONFIG), str(folder / CONFIG))


def special_ids_of(folder: Path, settings: Settings) -> dict[str, int | list[int]]:
    """Of an id that several places give, the last one's, as in transformers."""
    generation = Settings(read_object(folder / GENERATION), str(folder / GENERATION))
    return language_half(settings).special_ids() | settings.special_ids() | generation.special_ids()


def language_half(settings: Settings) -> Settings:
    """The whole, but for a model that also sees; whether its head is tied, the whole may say."""
    half, tied = settings.table("text_config"), "tie_word_embeddings"
    if not half.data:
        return settings
    return Settings({**half.data, **({tied: settings.data[tied]} if tied in settings else {})}, half.where)


def settled(family: Family, settings: Settings, tensor_names: set[str] | None) -> ModelConfig:
    assert family.read is not None
    config = family.read(language_half(settings))
    return config if tensor_names is None else family.settle(config, tensor_names)


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file, as the index has it."""
    places = Settings(read_json(folder / INDEX), str(folder / INDEX)).table("weight_map").data
    for name in sorted({str(name) for name in places.values()}):
        if not re.fullmatch(r"[\w.-]+\.safetensors", name):  # no separator of folders is among these
            raise ClearheadError(f"{folder / INDEX} names the file {name!r}; only safetensors files beside it are read")
    return {tensor: str(name) for tensor, name in places.items()}


def shard_names(folder: Path) -> list[str]:
    """The safetensors files of a folder, by its index where it has one."""
    if (folder / INDEX).exists():
        names = sorted(set(weight_map(folder).values()))
        missing = next((name for name in names if not (folder / name).is_file()), None)
        if missing:
            raise ClearheadError(f"{folder} lacks {missing}, which its index names")
        return names
    if (folder / WEIGHTS).exists():
        return [WEIGHTS]
    pickles = [path.name for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl") for path in folder.glob(kind)]
    only = f"; it holds only {pickles[0]}, a pickle, which is never opened" if pickles else ""
    raise ClearheadError(f"{folder} has no {WEIGHTS}{only}; convert the model to safetensors first")


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
    # Of an id that is not named, transformers takes its class's own, which the vocabulary may not even have.
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")) | (special_ids or {})
    config = family.write(network.config) | {"dtype": dtype} | ids
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    (folder / GENERATION).unlink(missing_ok=True)  # of a model that was here before: it would overrule these ids
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
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else WEIGHTS
        tensors = {name: foreign_tensor(rows[name], own, network) for name in names}
        write_safetensors(folder / file, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = folder / INDEX
    if len(shards) > 1:
        write_text(index, json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")
    else:
        index.unlink(missing_ok=True)
    for stale in {*folder.glob("model-*-of-*.safetensors"), *folder.glob(WEIGHTS)}:
        if stale.name not in weight_map.values():
            stale.unlink()  # of an earlier save: readers would take it for the model


def own_bytes(target: str, own: dict[str, Tensor]) -> int:
    name, index = parse_target(target)
    num_bytes = own[name].numel() * own[name].element_size()
    return num_bytes if index is None else num_bytes // len(own[name])
