"""Load the recurrent baseline from a native folder, whose description gives the kind of its network.

save_native(network, folder); network, special_ids = load_recurrent(folder)
"""

from pathlib import Path
from typing import Any

import torch

from clearhead.checkpoint.assembly import build_empty_network, check_names, check_num_layers
from clearhead.checkpoint.interface import LoadOptions
from clearhead.checkpoint.native import (
    DESCRIPTION_FILE,
    RECURRENT,
    WEIGHTS_FILE,
    network_kind,
    read_description,
)
from clearhead.checkpoint.placement import TensorPlacer
from clearhead.checkpoint.replacement import check_complete
from clearhead.checkpoint.tensors import open_safetensors
from clearhead.config import from_dict
from clearhead.files import check_path_length
from clearhead.home import expand_user
from clearhead.model import RecurrentConfig, RecurrentTranslator


def is_recurrent(folder: str | Path) -> bool:
    """Return whether a path is a native folder with a recurrent network."""
    path = expand_user(folder)
    check_path_length(path)
    return (path / DESCRIPTION_FILE).is_file() and network_kind(read_description(path)) == RECURRENT


def read_recurrent_config(folder: str | Path) -> RecurrentConfig:
    """Return the config of the network in a native folder without reading its weights."""
    path = expand_user(folder)
    check_complete(path)
    return from_dict(RecurrentConfig, read_description(path).data.get("model"), "model")


def load_recurrent(
    folder: Path, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> tuple[RecurrentTranslator, dict[str, Any]]:
    """Return the network in a native folder and its special ids; without `dtype` the stored precision is kept."""
    check_complete(folder)
    description = read_description(folder)
    config = from_dict(RecurrentConfig, description.data.get("model"), "model")
    where = str(folder / WEIGHTS_FILE)
    tensors = open_safetensors([folder / WEIGHTS_FILE], where)
    check_num_layers(config.num_layers, len(tensors), where)
    network = build_empty_network(RecurrentTranslator, config, where)
    placer = TensorPlacer(network, where, LoadOptions(dtype=dtype, device=device))
    check_names(placer.shapes.keys(), tensors.keys(), where)
    for name in placer.shapes:
        placer.place_own(name, tensors[name])
    placer.finish()
    return network, description.object("special_ids").special_ids()
