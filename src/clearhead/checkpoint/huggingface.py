"""Load and save Hugging Face folders: config.json and one or several safetensors files.

    loaded = load_folder(path); save_folder(loaded.network, other_path, loaded.family)

Only safetensors files are read. Pickle files are never opened, whatever their names are.
"""

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.architecture import ModelConfig
from clearhead.backends import PackedWeight
from clearhead.checkpoint.assembly import NamingScheme, assemble_network
from clearhead.checkpoint.folder_tokenizer import load_folder_tokenizer
from clearhead.checkpoint.huggingface_config import (
    config_from,
    folder_config,
    language_settings_of,
    merge_special_ids,
    name_table,
)
from clearhead.checkpoint.interface import DEFAULT_OPTIONS, LoadOptions, ModelParts
from clearhead.checkpoint.labels import Labels, read_labels
from clearhead.checkpoint.placement import network_dtype, stored_tensors
from clearhead.checkpoint.quantized_folder import Quantization, read_quantization
from clearhead.checkpoint.sentence_folder import load_sentence_pooler, network_folder
from clearhead.checkpoint.speech import FEATURES_FILE, SpeechSettings, check_features, feature_settings, read_speech
from clearhead.checkpoint.tensors import open_safetensors
from clearhead.errors import ClearheadError, quote
from clearhead.families import (
    Family,
    Settings,
    TensorRule,
    expand_table,
    family_for,
    family_of_type,
    split_expert_index,
)
from clearhead.files import MAX_JSON_TABLE_BYTES, check_path_length, read_json, read_json_object, write_text
from clearhead.model import Transformer
from clearhead.tensor_files import write_safetensors

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
_GENERATION_FILE = "generation_config.json"
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_SHARD_BYTES = 5 * 10**9  # the shard size of the Hub's own tools


# --- loading


def load_folder(folder: Path, options: LoadOptions = DEFAULT_OPTIONS) -> ModelParts:
    """Load a model from a Hugging Face folder, or from a folder of the sentence-transformers library."""
    outer, folder = folder, network_folder(folder)
    settings = _read_settings(folder)
    family = family_of_type(language_settings_of(settings).string("model_type"))
    quantization = read_quantization(settings)
    if options.weights == "stored" and quantization is None:
        raise ClearheadError(
            f"{folder} has no stored blocks, which only .gguf files and quantized folders have; "
            "use weights='int8' or 'int4' instead"
        )
    tensors = _open_tensors(folder, quantization, keep_packed=options.weights == "stored")
    with _explain_quantization(settings):
        network = assemble_model(family, settings, tensors, str(folder), options)
    note = None if quantization is None else quantization.note(str(folder), network_dtype(network))
    if note is not None:
        warnings.warn(note, stacklevel=2)
    special_ids = read_special_ids(folder, settings)
    sentence = load_sentence_pooler(outer, network.config.width, options, network_dtype(network))
    labels = read_labels(network.config.classifier, settings)
    speech = read_speech(network.config, _read_generation(folder))
    check_features(folder, network.config)
    return ModelParts(network, load_folder_tokenizer(folder), family, special_ids, sentence, labels, folder, speech)


def assemble_model(
    family: Family,
    settings: Settings,
    tensors: Mapping[str, Tensor | PackedWeight],
    where: str,
    options: LoadOptions = DEFAULT_OPTIONS,
) -> Transformer:
    """Build the network that config.json describes with the weights in `tensors`, which have the family's names."""
    naming = NamingScheme(
        table=name_table(family),
        base_model_prefix=family.base_model_prefix,
        legacy_suffixes=family.legacy_suffixes,
        duplicates=family.duplicates,
        ignored_tensors=family.ignored_tensors,
    )
    return assemble_network(config_from(family, settings, set(tensors)), tensors, where, naming, options)


def _open_tensors(
    folder: Path, quantization: Quantization | None, *, keep_packed: bool
) -> Mapping[str, Tensor | PackedWeight]:
    """Return the tensors of a folder; those of quantized folders under the names of full weights."""
    paths = [folder / name for name in _shard_names(folder)]
    stored = open_safetensors(paths, str(folder), raw=quantization is not None)
    return stored if quantization is None else quantization.open(stored, str(folder), keep_packed=keep_packed)


@contextmanager
def _explain_quantization(settings: Settings) -> Iterator[None]:
    """Add to an error that config.json declares quantized weights.

    The declaration alone is not an error, because a config may keep it after the weights were dequantized.
    """
    try:
        yield
    except ClearheadError as error:
        method = settings.object("quantization_config").data.get("quant_method")
        if method is None or read_quantization(settings) is not None:
            raise
        raise ClearheadError(
            f"{error}; config.json says that the weights are quantized ({method}), which is not supported: "
            "use a version of the model with full weights, or a .gguf file"
        ) from None


def read_folder_config(folder: Path) -> ModelConfig:
    """Return the config of a folder without reading its weights; the weight files may still be missing."""
    folder = network_folder(folder)
    settings = _read_settings(folder)
    family = family_of_type(language_settings_of(settings).string("model_type"))
    quantization, names = read_quantization(settings), None
    if (folder / INDEX_FILE).exists():
        names = set(read_index(folder))
    elif (folder / WEIGHTS_FILE).exists():
        names = set(open_safetensors([folder / WEIGHTS_FILE], str(folder), raw=quantization is not None))
    if names is not None and quantization is not None:
        names = set(quantization.names(names))
    return config_from(family, settings, names)


def _read_settings(folder: Path) -> Settings:
    """Return the content of config.json."""
    return Settings(read_json(folder / CONFIG_FILE), str(folder / CONFIG_FILE))


def read_special_ids(folder: Path, settings: Settings) -> dict[str, int | list[int]]:
    """Return the special ids of a folder; generation_config.json overrides config.json, as in transformers."""
    return merge_special_ids(settings, _read_generation(folder))


def _read_generation(folder: Path) -> Settings:
    """Return the content of generation_config.json, which is empty if there is no such file."""
    path = folder / _GENERATION_FILE
    return Settings(read_json_object(path), str(path))


def read_index(folder: Path) -> dict[str, str]:
    """Return a dict from tensor name to file name, from the index of a sharded checkpoint."""
    index = read_json(folder / INDEX_FILE, MAX_JSON_TABLE_BYTES)
    weight_map = Settings(index, str(folder / INDEX_FILE)).object("weight_map").data
    for name in sorted({str(name) for name in weight_map.values()}):
        check_path_length(name)
        if not re.fullmatch(r"[\w.-]+\.safetensors", name):  # excludes path separators
            raise ClearheadError(
                f"{folder / INDEX_FILE} names the file {quote(name)}; it may only name safetensors files "
                "in its own folder"
            )
    return {tensor: str(name) for tensor, name in weight_map.items()}


def _shard_names(folder: Path) -> list[str]:
    """Return the names of the safetensors files in a folder, from its index if it has one."""
    if (folder / INDEX_FILE).exists():
        names = sorted(set(read_index(folder).values()))
        missing = next((name for name in names if not (folder / name).exists()), None)
        if missing:
            raise ClearheadError(f"{folder} lacks {missing}, which its index names")
        return names
    if (folder / WEIGHTS_FILE).exists():
        return [WEIGHTS_FILE]
    pickles = [path.name for pattern in _PICKLE_PATTERNS for path in folder.glob(pattern)]
    found = f" but {pickles[0]}, a pickle file, which is never opened" if pickles else ""
    raise ClearheadError(f"{folder} has no {WEIGHTS_FILE}{found}; convert the model to safetensors first")


# --- saving


def save_folder(
    network: Transformer,
    folder: Path,
    family: Family | None = None,
    special_ids: dict[str, Any] | None = None,
    labels: Labels | None = None,
    speech: SpeechSettings | None = None,
    shard_bytes: int = _SHARD_BYTES,
) -> Family:
    """Write config.json and the weights in the format of transformers. Return the family whose format was used.

    Without `family`, the first one that can express the config is used. The tokenizer is saved separately.
    """
    family = family or family_for(network.config)
    config = folder_config(network, family, special_ids, labels)
    tensors = stored_tensors(network)
    rules = dict(expand_table(name_table(family), network.config, set(tensors)))
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
    (folder / _GENERATION_FILE).unlink(missing_ok=True)  # one of an earlier model would override these ids
    if speech is not None:
        write_text(folder / _GENERATION_FILE, json.dumps(speech.settings(network.config.context), indent=2) + "\n")
        write_text(folder / FEATURES_FILE, json.dumps(feature_settings(network.config), indent=2) + "\n")
    shards, total_bytes = _divide_into_shards(rules, tensors, shard_bytes)
    for file, names in shards.items():
        joined = {name: join_tensor(rules[name], tensors, network.config).cpu() for name in names}
        write_safetensors(folder / file, joined, {"format": "pt"})
    _write_index(folder, shards, total_bytes)
    _remove_stale_weights(folder, shards)
    return family


def _divide_into_shards(
    rules: dict[str, TensorRule], tensors: dict[str, Tensor], shard_bytes: int
) -> tuple[dict[str, list[str]], int]:
    """Return a dict from file name to the tensors in that file, and the size of all tensors."""
    groups: list[list[str]] = [[]]
    group_bytes, total_bytes = 0, 0
    for name, rule in rules.items():
        num_bytes = sum(tensor_bytes(own_name, tensors) for own_name in rule.own_names)
        if group_bytes + num_bytes > shard_bytes and groups[-1]:
            groups.append([])
            group_bytes = 0
        groups[-1].append(name)
        group_bytes, total_bytes = group_bytes + num_bytes, total_bytes + num_bytes
    if len(groups) == 1:
        return {WEIGHTS_FILE: groups[0]}, total_bytes
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": names for i, names in enumerate(groups, 1)}, total_bytes


def tensor_bytes(own_name: str, tensors: dict[str, Tensor]) -> int:
    """Return the size of one of our tensors, or of one expert's slice of it."""
    name, expert = split_expert_index(own_name)
    num_bytes = tensors[name].numel() * tensors[name].element_size()
    return num_bytes if expert is None else num_bytes // len(tensors[name])


def join_tensor(rule: TensorRule, tensors: dict[str, Tensor], config: ModelConfig) -> Tensor:
    """Return the tensor that the family stores for one or several of ours."""
    parts = []
    for own_name in rule.own_names:
        name, expert = split_expert_index(own_name)
        parts.append(tensors[name].detach() if expert is None else tensors[name].detach()[expert])
    # The whole storage behind a view would be written, so the result must own its storage.
    return rule.join(parts, config).clone(memory_format=torch.contiguous_format)


def _write_index(folder: Path, shards: dict[str, list[str]], total_bytes: int) -> None:
    """Write the index of several shards; delete one that an earlier save left."""
    if len(shards) == 1:
        (folder / INDEX_FILE).unlink(missing_ok=True)
        return
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_text(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")


def _remove_stale_weights(folder: Path, shards: dict[str, list[str]]) -> None:
    """Delete the weight files of an earlier save, which a reader could mistake for the model's."""
    for path in {*folder.glob("model-*-of-*.safetensors"), *folder.glob(WEIGHTS_FILE)}:
        if path.name not in shards:
            path.unlink()
