"""GGUF's own blocks in place of numbers: the matrices stored as Q4_0, Q4_1 or Q8_0 stay so in the network.

    keep_blocks_of(Path("model.gguf"), network)

A row of the table of names may reorder a matrix's rows (rotary pairs) or cut it into several; a block lies within one
row, so the same is done to packed rows, and no weight is rounded twice.
"""

from pathlib import Path

import torch
from torch import nn

from clearhead.backends import (
    NATIVE_BLOCK_TYPES,
    AcceleratedHead,
    Packed,
    PackedLinear,
    PackedMatrix,
    PackedTable,
    pack_gguf_blocks,
)
from clearhead.checkpoint.gguf import open_gguf
from clearhead.families import Row, expand, gguf
from clearhead.model import LogitHead, Transformer


def keep_blocks_of(path: Path, network: Transformer) -> None:
    """In place, one matrix at a time."""
    file, place = open_gguf(path), network.device
    names = gguf.architecture_of(file.metadata).names
    for foreign, row in list(expand(names, network.config, set(dict(network.named_parameters())))):
        stored = file.tensors.get(foreign)
        if stored is None or stored.block_type.name not in NATIVE_BLOCK_TYPES or len(stored.shape) != 2:
            continue
        whole = pack_gguf_blocks(torch.from_numpy(file.raw(foreign)), stored.shape[0], stored.block_type.name)
        for own, packed in zip(row.own, parts(whole, row, network), strict=True):
            put(network, own, packed)
    network.to(place)


def parts(whole: Packed, row: Row, network: Transformer) -> list[Packed]:
    """What `row.split` does to numbers, done to the numbers of the rows."""
    shapes = [torch.Size([network.get_parameter(own).shape[0], 1]) for own in row.own]
    order = row.split(torch.arange(whole.shape[0])[:, None], shapes, network.config)
    return [whole.rows(index[:, 0]) for index in order]


def put(network: Transformer, own: str, packed: Packed) -> None:
    owner_name, _, leaf = own.rpartition(".")
    owner = network.get_submodule(owner_name)
    if isinstance(owner, nn.Linear) and leaf == "weight":
        network.set_submodule(owner_name, PackedLinear(packed, owner.bias, owner.weight.dtype))
    elif isinstance(owner, nn.Embedding):
        network.set_submodule(owner_name, PackedTable(packed, owner.weight.dtype))
        head: nn.Module | None = network.head
        if isinstance(head, LogitHead) and head.weight is None:  # tied: it reads the same blocks
            network.head = AcceleratedHead(head, None)  # type: ignore[assignment]
    elif isinstance(owner, LogitHead) and owner.weight is not None and leaf == "weight":
        network.head = AcceleratedHead(owner, PackedMatrix(packed, owner.weight.dtype))  # type: ignore[assignment]
