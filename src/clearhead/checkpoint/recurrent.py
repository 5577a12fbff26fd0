"""The recurrent baseline in a folder of our own format, told from a Transformer by the kind in its description.

save_native(network, folder); network, special_ids = load_recurrent(folder)
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.checkpoint.fill import Placement, listed
from clearhead.checkpoint.native import DESCRIPTION, RECURRENT, WEIGHTS, describe, kind_in
from clearhead.checkpoint.tensors import read_safetensors
from clearhead.config import from_dict
from clearhead.errors import ClearheadError
from clearhead.home import expand_user
from clearhead.model import RecurrentConfig, RecurrentTranslator


def is_recurrent(folder: str | Path) -> bool:
    path = expand_user(folder)
    return (path / DESCRIPTION).is_file() and kind_in(describe(path)) == RECURRENT


def load_recurrent(
    folder: Path, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> tuple[RecurrentTranslator, dict[str, Any]]:
    """The network and its special ids; `dtype` None: as stored."""
    description = describe(folder)
    config = from_dict(RecurrentConfig, description.data.get("model"), "model")
    with torch.device("meta"):
        network = RecurrentTranslator(config)
    where = str(folder / WEIGHTS)
    tensors = read_safetensors([folder / WEIGHTS], where)
    shapes = {name: weight.shape for name, weight in network.named_parameters()}
    network.load_state_dict(put_all(tensors, Placement(shapes, where, dtype, device)), assign=True)
    return network.eval(), description.table("special_ids").special_ids()


def put_all(tensors: Mapping[str, Tensor], places: Placement) -> dict[str, Tensor]:
    """Every tensor in its place, none missing and none left over."""
    missing, extra = sorted(places.shapes.keys() - tensors.keys()), sorted(tensors.keys() - places.shapes.keys())
    if missing:
        raise ClearheadError(f"{places.where} lacks {listed(missing)}")
    if extra:
        raise ClearheadError(f"{places.where} holds {listed(extra)}, which this model has no place for")
    for name, shape in places.shapes.items():
        tensor = tensors[name]
        places.check(name, tensor)
        if tensor.shape != shape:
            raise places.misshapen(name, tensor, [shape])
        places.place(name, None, tensor)
    return places.finished()
