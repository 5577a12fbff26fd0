"""GGUF's own blocks in place of numbers: the matrices stored as Q4_0, Q4_1 or Q8_0 stay so in the network.

    keep_blocks(network, file, architecture.names)

A row of the table of names may reorder a matrix's rows (rotary pairs) or cut it into several; a block lies within one
row, so the same is done to packed rows, and no weight is rounded twice.
"""

import torch
from torch import nn

from clearhead.checkpoint.gguf import GgufFile
from clearhead.families.names import Row, Table, expand
from clearhead.fast.modules import FastHead, PackedLinear, PackedMatrix, PackedTable
from clearhead.fast.packed import KEPT_AS_THEY_ARE, Packed, from_blocks
from clearhead.model.transformer import Transformer


def keep_blocks(network: Transformer, file: GgufFile, names: Table) -> None:
    """In place, one matrix at a time."""
    for foreign, row in expand(names, network.config, set(dict(network.named_parameters()))):
        stored = file.tensors.get(foreign)
        if stored is None or stored.block_type.name not in KEPT_AS_THEY_ARE or len(stored.shape) != 2:
            continue
        whole = from_blocks(torch.tensor(file.raw(foreign)), stored.shape[0], stored.block_type.name)
        for own, packed in zip(row.own, parts(whole, row, network), strict=True):
            put(network, own, packed)
    if network.head is not None and isinstance(network.decoder.embedding.tokens, PackedTable):  # type: ignore[union-attr]
        if network.head.weight is None:
            network.head = FastHead(network.head, None)  # type: ignore[assignment]


def parts(whole: Packed, row: Row, network: Transformer) -> list[Packed]:
    """What `row.split` does to numbers, done to the numbers of the rows."""
    shapes = [torch.Size([network.get_parameter(own).shape[0], 1]) for own in row.own]
    order = row.split(torch.arange(whole.shape[0])[:, None], shapes, network.config)
    return [whole.rows(index[:, 0]) for index in order]


def put(network: Transformer, own: str, packed: Packed) -> None:
    owner_name, _, leaf = own.rpartition(".")
    owner = network.get_submodule(owner_name)
    parent_name, _, name = owner_name.rpartition(".")
    parent = network.get_submodule(parent_name)
    if isinstance(owner, nn.Linear) and leaf == "weight":
        setattr(parent, name, PackedLinear(packed, owner.bias))
    elif isinstance(owner, nn.Embedding):
        setattr(parent, name, PackedTable(packed, owner.weight.dtype))
    elif owner is network.head and leaf == "weight":
        network.head = FastHead(network.head, PackedMatrix(packed))  # type: ignore[assignment]
