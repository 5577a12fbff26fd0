"""Clearhead's own folder: clearhead.json says what the model is, weights.safetensors holds it under our names.

save_native(network, folder, family_name="llama"); loaded = load_native(folder)
"""

import json
from pathlib import Path
from typing import Any

import torch

from clearhead.architecture import ModelConfig
from clearhead.checkpoint.fill import LoadedModel, Progress, fill, slots
from clearhead.checkpoint.tensors import read_safetensors
from clearhead.config import from_dict, kind_of, to_dict
from clearhead.errors import ClearheadError, unknown_name
from clearhead.families import FAMILIES, Settings
from clearhead.files import read_json, write_safetensors, write_text
from clearhead.model import RecurrentTranslator, Transformer

DESCRIPTION, WEIGHTS = "clearhead.json", "weights.safetensors"
FORMAT = 1
TRANSFORMER, RECURRENT = kind_of(Transformer), kind_of(RecurrentTranslator)


def save_native(
    network: Transformer | RecurrentTranslator,
    folder: Path,
    family_name: str | None = None,
    special_ids: dict[str, Any] | None = None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in slots(network).items()}
    write_safetensors(folder / WEIGHTS, tensors)
    description = {"format": FORMAT, "kind": kind_of(type(network)), "family": family_name}
    description |= {"special_ids": special_ids or {}, "model": to_dict(network.config)}
    write_text(folder / DESCRIPTION, json.dumps(description, indent=2) + "\n")


def load_native(
    folder: Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    config, description = read_description(folder)
    where = str(folder / WEIGHTS)
    tensors = read_safetensors([folder / WEIGHTS], where)
    network = fill(config, tensors, where=where, names=None, dtype=dtype, device=device, progress=progress)
    name = description.text("family", "")
    family = next((family for family in FAMILIES if family.name == name), None)
    return LoadedModel(network, family=family, special_ids=description.table("special_ids").special_ids())


def native_config(folder: Path) -> ModelConfig:
    return read_description(folder)[0]


def read_description(folder: Path) -> tuple[ModelConfig, Settings]:
    description = describe(folder)
    if kind_in(description) == RECURRENT:
        raise ClearheadError(f"{folder} holds a recurrent network, where a Transformer is needed")
    return from_dict(ModelConfig, description.data.get("model"), "model"), description


def describe(folder: Path) -> Settings:
    description = Settings(read_json(folder / DESCRIPTION), str(folder / DESCRIPTION))
    number = description.whole("format")
    if number != FORMAT:
        raise ClearheadError(f"{description.where} has format {number}; this version reads {FORMAT}")
    return description


def kind_in(description: Settings) -> str:
    kind = description.text("kind", TRANSFORMER)
    if kind not in (TRANSFORMER, RECURRENT):
        raise unknown_name(f"kind in {description.where}:", kind, (TRANSFORMER, RECURRENT))
    return kind
