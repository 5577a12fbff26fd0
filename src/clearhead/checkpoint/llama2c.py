"""Load llama2.c's original checkpoints: seven int32, then all weights as float32, one after the other.

    open_llama2c("stories15M.bin").tensors["layers.0.attention.wq.weight"]   # (N * H, D)

Tensor names and rotary pairs are those of Meta's LLaMA checkpoints: features 2k and 2k + 1 of a head are rotated
together. The layout is in github.com/karpathy/llama2.c, `export.py` (legacy_export) and `run.c`.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clearhead.architecture import ModelConfig, Rope
from clearhead.checkpoint.assembly import NamingScheme, assemble_network
from clearhead.checkpoint.interface import DEFAULT_OPTIONS, LoadOptions, ModelParts
from clearhead.checkpoint.tensors import LazyTensors
from clearhead.errors import ClearheadError
from clearhead.families import META_LLAMA_NAMES, family_of_type, llama_config
from clearhead.files import check_regular
from clearhead.tokenization import load_tokenizer

HEADER = struct.Struct("<7i")
_LATER_VERSION_MAGIC = 0x616B3432  # "ak42": llama2.c's versions 1 and 2, whose layout differs
_FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Llama2cHeader:
    """The sizes of a model, from the header of its file."""

    width: int
    feed_forward_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    context_length: int
    tied: bool  # True: the token embedding is also the output head, and the file holds no `output.weight`

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.num_heads


@dataclass(frozen=True, kw_only=True)
class Llama2cCheckpoint:
    """The content of a file; a tensor is read at each access."""

    header: Llama2cHeader
    tensors: Mapping[str, Tensor]


def open_llama2c(path: str | PathLike[str]) -> Llama2cCheckpoint:
    """Compare the file's header with its length; the tensors are read later, one at a time."""
    path = Path(path)
    check_regular(path)
    try:
        with path.open("rb") as file:
            start = file.read(HEADER.size)
        file_bytes = path.stat().st_size
    except OSError as error:
        raise ClearheadError(f"cannot read {str(path)!r}: {error.strerror}") from error
    header = _parse_header(path, start)
    layout = _layout(header)
    expected_bytes = HEADER.size + _FLOAT_BYTES * sum(count * prod(shape) for _, count, shape in layout)
    if file_bytes != expected_bytes:
        raise ClearheadError(
            f"{str(path)!r} has {file_bytes} bytes, but its header implies {expected_bytes}; "
            "it is truncated or not a llama2.c checkpoint"
        )
    places = _locate_tensors(layout)
    return Llama2cCheckpoint(header=header, tensors=LazyTensors(places, lambda name: _read(path, *places[name])))


def _read(path: Path, offset_bytes: int, shape: tuple[int, ...]) -> Tensor:
    values = np.fromfile(path, dtype="<f4", count=prod(shape), offset=offset_bytes)
    if len(values) != prod(shape):
        raise ClearheadError(f"{str(path)!r} became shorter while it was being read")
    return torch.from_numpy(values).reshape(shape)


def is_llama2c(path: Path) -> bool:
    """Return whether a file is a llama2.c checkpoint: its length must be the one that its header implies."""
    try:
        open_llama2c(path)
    except ClearheadError:
        return False
    return True


def load_llama2c(path: Path, options: LoadOptions = DEFAULT_OPTIONS) -> ModelParts:
    """Load a llama2.c checkpoint, and its tokenizer from the file tokenizer.bin beside it, if there is one."""
    checkpoint = open_llama2c(path)
    config, naming = config_of(checkpoint.header), NamingScheme(table=META_LLAMA_NAMES)
    options = replace(options, dtype=options.dtype or torch.float32)
    network = assemble_network(config, checkpoint.tensors, str(path), naming, options)
    vocabulary = path.with_name("tokenizer.bin")
    tokenizer = load_tokenizer(vocabulary) if vocabulary.is_file() else None
    return ModelParts(network, tokenizer, family_of_type("llama"), {"bos_token_id": 1, "eos_token_id": 2})


def read_llama2c_config(path: Path) -> ModelConfig:
    """Return the config of a checkpoint without reading its weights."""
    return config_of(open_llama2c(path).header)


def config_of(header: Llama2cHeader) -> ModelConfig:
    """Return the config of a LLaMA with these sizes."""
    return llama_config(
        width=header.width,
        num_layers=header.num_layers,
        num_heads=header.num_heads,
        num_kv_heads=header.num_kv_heads,
        feed_forward=header.feed_forward_width,
        vocab_size=header.vocab_size,
        context=header.context_length,
        rope=Rope(),
        tied=header.tied,
    )


def _parse_header(path: Path, start: bytes) -> Llama2cHeader:
    if len(start) < HEADER.size:
        raise ClearheadError(f"{str(path)!r} is too short for a llama2.c checkpoint: {len(start)} bytes")
    width, feed_forward_width, num_layers, num_heads, num_kv_heads, vocab_size, context_length = HEADER.unpack(start)
    if width == _LATER_VERSION_MAGIC:
        raise ClearheadError(
            f"{str(path)!r} is a llama2.c checkpoint of version {feed_forward_width}; "
            "only version 0 can be read (export.py --version 0)"
        )
    sizes = (width, feed_forward_width, num_layers, num_heads, num_kv_heads, abs(vocab_size), context_length)
    if min(sizes) < 1 or width % (2 * num_heads) or num_heads % num_kv_heads:
        raise ClearheadError(f"{str(path)!r} is not a llama2.c checkpoint: its header gives the sizes {sizes}")
    return Llama2cHeader(
        width=width,
        feed_forward_width=feed_forward_width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        vocab_size=abs(vocab_size),
        context_length=context_length,
        tied=vocab_size > 0,  # llama2.c uses the sign as a flag
    )


def _layout(header: Llama2cHeader) -> list[tuple[str, int, tuple[int, ...]]]:
    """Return (name, count, shape of one) in file order; a name with `{}` is one tensor for each layer."""
    L, D, F, V = header.num_layers, header.width, header.feed_forward_width, header.vocab_size
    key_width = header.num_kv_heads * header.head_width
    rotary_table = (header.context_length, header.head_width // 2)
    layout: list[tuple[str, int, tuple[int, ...]]] = [
        ("tok_embeddings.weight", 1, (V, D)),
        ("layers.{}.attention_norm.weight", L, (D,)),
        ("layers.{}.attention.wq.weight", L, (D, D)),
        ("layers.{}.attention.wk.weight", L, (key_width, D)),
        ("layers.{}.attention.wv.weight", L, (key_width, D)),
        ("layers.{}.attention.wo.weight", L, (D, D)),
        ("layers.{}.ffn_norm.weight", L, (D,)),
        ("layers.{}.feed_forward.w1.weight", L, (F, D)),
        ("layers.{}.feed_forward.w2.weight", L, (D, F)),
        ("layers.{}.feed_forward.w3.weight", L, (F, D)),
        ("norm.weight", 1, (D,)),
        ("", 2, rotary_table),  # cosines and sines, which the sizes determine and no reader uses
    ]
    return layout if header.tied else [*layout, ("output.weight", 1, (V, D))]


def _locate_tensors(layout: list[tuple[str, int, tuple[int, ...]]]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return a dict from tensor name to (offset_bytes, shape)."""
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    offset_bytes = HEADER.size
    for name, count, shape in layout:
        for index in range(count):
            if name:
                places[name.format(index)] = (offset_bytes, shape)
            offset_bytes += _FLOAT_BYTES * prod(shape)
    return places
