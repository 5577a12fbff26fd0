"""Save and load Clearhead's own folders: clearhead.json describes the model, weights.safetensors holds its tensors.

save_native(network, folder, family_name="llama"); loaded = load_native(folder)
"""

import json
from pathlib import Path
from typing import Any

from clearhead.architecture import ModelConfig
from clearhead.checkpoint.assembly import NamingScheme, assemble_network
from clearhead.checkpoint.folder_tokenizer import load_folder_tokenizer
from clearhead.checkpoint.interface import DEFAULT_OPTIONS, LoadOptions, ModelParts
from clearhead.checkpoint.placement import stored_tensors
from clearhead.checkpoint.tensors import open_safetensors
from clearhead.config import from_dict, kind_of, to_dict
from clearhead.errors import ClearheadError, unknown_name
from clearhead.families import FAMILIES, Settings
from clearhead.files import read_json, write_text
from clearhead.model import RecurrentTranslator, Transformer
from clearhead.tensor_files import write_safetensors

DESCRIPTION_FILE, WEIGHTS_FILE = "clearhead.json", "weights.safetensors"
_FORMAT_VERSION = 1
_TRANSFORMER, RECURRENT = kind_of(Transformer), kind_of(RecurrentTranslator)


def save_native(
    network: Transformer | RecurrentTranslator,
    folder: Path,
    family_name: str | None = None,
    special_ids: dict[str, Any] | None = None,
) -> None:
    """Write a network to a folder, which is created if necessary. The tokenizer is saved separately."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in stored_tensors(network).items()}
    write_safetensors(folder / WEIGHTS_FILE, tensors)
    description = {"format": _FORMAT_VERSION, "kind": kind_of(type(network)), "family": family_name}
    description |= {"special_ids": special_ids or {}, "model": to_dict(network.config)}
    write_text(folder / DESCRIPTION_FILE, json.dumps(description, indent=2) + "\n")


def load_native(folder: Path, options: LoadOptions = DEFAULT_OPTIONS) -> ModelParts:
    """Load a Transformer from a folder that `save_native` wrote."""
    config, description = _read_transformer_description(folder)
    where = str(folder / WEIGHTS_FILE)
    tensors = open_safetensors([folder / WEIGHTS_FILE], where)
    network = assemble_network(config, tensors, where, NamingScheme(), options)
    family_name = description.string("family", "")
    family = next((family for family in FAMILIES if family.name == family_name), None)
    special_ids = description.object("special_ids").special_ids()
    return ModelParts(network, load_folder_tokenizer(folder), family, special_ids)


def read_native_config(folder: Path) -> ModelConfig:
    """Return the config in a folder without reading its weights."""
    return _read_transformer_description(folder)[0]


def _read_transformer_description(folder: Path) -> tuple[ModelConfig, Settings]:
    """Return the config and the whole description; raise ClearheadError if the network is not a Transformer."""
    description = read_description(folder)
    if network_kind(description) == RECURRENT:
        raise ClearheadError(f"{folder} holds a recurrent network; a Transformer is needed here")
    return from_dict(ModelConfig, description.data.get("model"), "model"), description


def read_description(folder: Path) -> Settings:
    """Return the content of clearhead.json."""
    description = Settings(read_json(folder / DESCRIPTION_FILE), str(folder / DESCRIPTION_FILE))
    version = description.integer("format")
    if version != _FORMAT_VERSION:
        raise ClearheadError(
            f"{description.where} has format {version}; this version of Clearhead reads format {_FORMAT_VERSION}"
        )
    return description


def network_kind(description: Settings) -> str:
    """Return TRANSFORMER or RECURRENT; raise ClearheadError for any other kind."""
    kind = description.string("kind", _TRANSFORMER)
    if kind not in (_TRANSFORMER, RECURRENT):
        raise unknown_name(f"kind in {description.where}:", kind, (_TRANSFORMER, RECURRENT))
    return kind
