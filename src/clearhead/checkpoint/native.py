"""Save and load Clearhead's own folders: clearhead.json describes the model, weights.safetensors holds its tensors.

save_native(network, folder, family_name="llama"); loaded = load_native(folder)
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from clearhead.architecture import ModelConfig
from clearhead.checkpoint.assembly import NamingScheme, StoredTensors, assemble_network
from clearhead.checkpoint.folder_tokenizer import load_folder_tokenizer
from clearhead.checkpoint.interface import DEFAULT_OPTIONS, LoadOptions, ModelParts
from clearhead.checkpoint.labels import Labels, read_labels
from clearhead.checkpoint.packed_weights import PACKED_KEY, join_packed_weights, packed_dtype, split_packed_weights
from clearhead.checkpoint.placement import network_dtype
from clearhead.checkpoint.sentence_folder import load_sentence_pooler
from clearhead.checkpoint.speech import SpeechSettings, read_speech
from clearhead.checkpoint.tensors import open_safetensors
from clearhead.config import from_dict, kind_of, to_dict
from clearhead.errors import ClearheadError, unknown_name
from clearhead.families import FAMILIES, Settings
from clearhead.files import read_json, write_text
from clearhead.model import RecurrentTranslator, Transformer
from clearhead.tensor_files import write_safetensors

DESCRIPTION_FILE, WEIGHTS_FILE = "clearhead.json", "weights.safetensors"
_FORMAT_VERSION = 1
_DTYPE_KEY = "compute_dtype"  # only with packed weights; otherwise it is the dtype of the weights
_COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TRANSFORMER, RECURRENT = kind_of(Transformer), kind_of(RecurrentTranslator)


def save_native(
    network: Transformer | RecurrentTranslator,
    folder: Path,
    family_name: str | None = None,
    special_ids: dict[str, Any] | None = None,
    labels: Labels | None = None,
    speech: SpeechSettings | None = None,
) -> None:
    """Write a network to a folder, which is created if necessary. The tokenizer is saved separately."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, packed_columns = split_packed_weights(network)
    write_safetensors(
        folder / WEIGHTS_FILE, {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    )
    description = {"format": _FORMAT_VERSION, "kind": kind_of(type(network)), "family": family_name}
    description |= {"special_ids": special_ids or {}, "model": to_dict(network.config)}
    description |= {"labels": labels.settings()} if labels is not None else {}
    description |= {"speech": speech.settings(network.config.context)} if speech is not None else {}
    if packed_columns:
        description |= {_DTYPE_KEY: str(packed_dtype(network)).removeprefix("torch."), PACKED_KEY: packed_columns}
    write_text(folder / DESCRIPTION_FILE, json.dumps(description, indent=2) + "\n")


def load_native(folder: Path, options: LoadOptions = DEFAULT_OPTIONS) -> ModelParts:
    """Load a Transformer from a folder that `save_native` wrote."""
    config, description = _read_transformer_description(folder)
    where = str(folder / WEIGHTS_FILE)
    tensors: StoredTensors = open_safetensors([folder / WEIGHTS_FILE], where)
    if PACKED_KEY in description:
        options = _packed_options(description, options)
        tensors = join_packed_weights(tensors, description, where)  # type: ignore[arg-type]
    network = assemble_network(config, tensors, where, NamingScheme(), options)
    family_name = description.string("family", "")
    family = next((family for family in FAMILIES if family.name == family_name), None)
    special_ids = description.object("special_ids").special_ids()
    sentence = load_sentence_pooler(folder, config.width, options, network_dtype(network))
    labels = read_labels(config.classifier, description.object("labels"))
    speech = read_speech(config, description.object("speech"))
    return ModelParts(network, load_folder_tokenizer(folder), family, special_ids, sentence, labels, speech=speech)


def _packed_options(description: Settings, options: LoadOptions) -> LoadOptions:
    """Return the options for a folder with packed weights, which keep their format, in the dtype it was saved with."""
    if options.weights != "full":
        raise ClearheadError(
            f"{description.where} describes weights that are already packed; leave out weights={options.weights!r}"
        )
    name = description.string(_DTYPE_KEY)
    if name not in _COMPUTE_DTYPES:
        raise unknown_name(f"dtype in {description.where}:", name, _COMPUTE_DTYPES)
    return replace(options, dtype=options.dtype or _COMPUTE_DTYPES[name])


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
