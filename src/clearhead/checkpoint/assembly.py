"""Assemble a network from the tensors of a checkpoint, whatever their names are.

    network = assemble_network(config, tensors, "model.safetensors", NamingScheme(table=family.tensor_names), options)

The network is built on PyTorch's meta device, without memory, and filled one tensor at a time. Every tensor of the
checkpoint must be used once or be listed as ignored, and every tensor of the network must be there.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from clearhead.architecture import ModelConfig
from clearhead.backends import PackedWeight, return_freed_memory
from clearhead.checkpoint.interface import LoadOptions
from clearhead.checkpoint.placement import TensorPlacer, stored_tensors
from clearhead.errors import ClearheadError, shorten
from clearhead.families import NUM_LAYERS_PLACEHOLDER, NameTable, TensorRule, expand_table
from clearhead.model import Transformer

LANGUAGE_MODEL = "language_model."  # in each name of the language part of a model that also reads images
_MAX_LISTED_NAMES = 4
_RETURN_BYTES = 1 << 25  # stored tensors after which freed memory is returned to the system

Config = TypeVar("Config")
Network = TypeVar("Network")
StoredTensors = Mapping[str, Tensor | PackedWeight]


@dataclass(frozen=True, kw_only=True)
class NamingScheme:
    """How a checkpoint names its tensors; see the fields of the same names in `families.Family`."""

    table: NameTable | None = None  # None: the names are ours
    base_model_prefix: str = ""
    legacy_suffixes: Mapping[str, str] = field(default_factory=dict)
    duplicates: Mapping[str, str] = field(default_factory=dict)
    ignored_tensors: tuple[str, ...] = ()


def assemble_network(
    config: ModelConfig, tensors: StoredTensors, where: str, naming: NamingScheme, options: LoadOptions
) -> Transformer:
    """Build the network of `config` with the weights in `tensors`, which are read one at a time.

    `where` is the file or folder that error messages name. Without a dtype in `options` the network gets that of its
    token table.
    """
    num_layers = sum(len(stack.layers) for stack in (config.encoder, config.decoder) if stack is not None)
    check_num_layers(num_layers, len(tensors), where)
    network = build_empty_network(Transformer, config, where)
    own_names = list(stored_tensors(network))
    entries = expand_table(naming.table or {name: name for name in own_names}, config, set(own_names))
    # One entry more than the file has tensors is enough to see that tensors are missing, and bounds the work.
    rules = dict(islice(entries, len(tensors) + 1))
    stored_names = _match_names(set(tensors), rules.keys(), naming)
    num_output_layers = str(len(config.output_stack.layers))
    ignored = [pattern.replace(NUM_LAYERS_PLACEHOLDER, num_output_layers) for pattern in naming.ignored_tensors]
    check_names(rules.keys(), stored_names.keys(), where, naming.duplicates, ignored)
    dtype = options.dtype or _token_table_dtype(rules, stored_names, tensors)
    placer = TensorPlacer(network, where, replace(options, dtype=dtype))
    num_unreturned_bytes = 0
    for num_done, (name, rule) in enumerate(rules.items(), 1):
        num_unreturned_bytes += placer.place(name, rule, tensors[stored_names[name]])
        if num_unreturned_bytes > _RETURN_BYTES:
            return_freed_memory()
            num_unreturned_bytes = 0
        if options.progress is not None:
            options.progress(name, num_done, len(rules))
    for name, original in naming.duplicates.items():
        if name in stored_names and name not in rules:
            _check_duplicate(name, original, tensors[stored_names[name]], tensors[stored_names[original]], where)
    placer.finish()
    return_freed_memory()
    return network


def check_num_layers(num_layers: int, num_tensors: int, where: str) -> None:
    """Raise ClearheadError if there are fewer tensors than layers; each layer takes 50 kB even on the meta device."""
    if num_layers > num_tensors:
        raise ClearheadError(
            f"{where} holds {num_tensors} tensors, too few for the {num_layers} layers of the config; "
            "it is incomplete: download it again"
        )


def build_empty_network(network_class: Callable[[Config], Network], config: Config, where: str) -> Network:
    """Build a network on the meta device: its tensors have shapes but no memory."""
    try:
        with torch.device("meta"):
            return network_class(config)
    except RuntimeError as error:  # the sizes multiply to more elements than a tensor can have
        raise ClearheadError(f"{where}: a model of these sizes cannot be created: {error}") from None


def _token_table_dtype(
    rules: Mapping[str, TensorRule], stored_names: Mapping[str, str], tensors: StoredTensors
) -> torch.dtype | None:
    """Return the dtype of the stored token table, for the whole network; None if there is no table.

    Norms are often stored more precisely than matrices, but one network needs one dtype.
    """
    for name, rule in rules.items():
        if rule.own_names[0].endswith("embedding.tokens.weight"):
            table = tensors[stored_names[name]]
            return table.dtype if isinstance(table, Tensor) else torch.float32
    return None


def _match_names(stored: Set[str], expected: Set[str], naming: NamingScheme) -> dict[str, str]:
    """Return a dict from the names in the name table to the names in the file.

    Names in the file may have an old suffix, may contain `language_model.`, and in checkpoints of the bare model lack
    the prefix.
    """
    matched = {}
    for name in stored:
        old_suffix = next((suffix for suffix in naming.legacy_suffixes if name.endswith(suffix)), "")
        new_suffix = naming.legacy_suffixes.get(old_suffix, "")
        new_name = name.replace(LANGUAGE_MODEL, "", 1).removesuffix(old_suffix) + new_suffix
        # If a file has both spellings, the old one keeps its name and is reported as unexpected.
        matched[name if new_name in stored else new_name] = name
    prefix = naming.base_model_prefix
    if prefix and not any(name.startswith(prefix) for name in matched):
        bare_names = {name.removeprefix(prefix) for name in expected if name.startswith(prefix)}
        matched = {
            prefix + name if name in bare_names or name not in expected else name: stored_name
            for name, stored_name in matched.items()
        }
    return matched


def check_names(
    expected: Set[str],
    stored: Set[str],
    where: str,
    duplicates: Mapping[str, str] | None = None,
    ignored: Iterable[str] = (),
) -> None:
    """Raise ClearheadError if a tensor is missing, or if one is neither expected nor a duplicate nor ignored.

    `ignored` are regular expressions.
    """
    missing = sorted(expected - stored)
    if missing:
        raise ClearheadError(
            f"{where} lacks {_list_tensors(missing)}; it is incomplete or has another architecture: "
            "download it again, or check that its config belongs to it"
        )
    patterns, originals = [re.compile(pattern) for pattern in ignored], duplicates or {}
    unexpected = [
        name
        for name in sorted(stored - expected)
        if originals.get(name) not in stored and not any(pattern.fullmatch(name) for pattern in patterns)
    ]
    if unexpected:
        raise ClearheadError(
            f"{where} holds {_list_tensors(unexpected)}, which this model does not have; check that "
            "its config belongs to it"
        )


def _list_tensors(names: list[str]) -> str:
    """Return "the tensor a", "the tensors a, b", or for many their number and the first names."""
    shown = ", ".join(shorten(name) for name in names[:_MAX_LISTED_NAMES])
    if len(names) > _MAX_LISTED_NAMES:
        return f"{len(names)} tensors, the first {shown}"
    return f"the tensor{'s' if len(names) > 1 else ''} {shown}"


def _check_duplicate(
    name: str, original_name: str, tensor: Tensor | PackedWeight, original: Tensor | PackedWeight, where: str
) -> None:
    """Raise ClearheadError if two tensors that the config declares as shared differ."""
    assert isinstance(tensor, Tensor)
    assert isinstance(original, Tensor)
    if not torch.equal(tensor, original):
        raise ClearheadError(f"{where}: {name} differs from {original_name}, but the config says that they are shared")
