"""Reads llama2.c's original checkpoint: seven int32, then every weight as float32, one after the other.

    open_llama2c("stories15M.bin").tensors["layers.0.attention.wq.weight"]   # (N * H, D)

Names are those of Meta's own LLaMA checkpoints, and so is the rotary pairing: features 2k and 2k + 1 of a
head turn together. The layout is in github.com/karpathy/llama2.c, `export.py` (legacy_export) and `run.c`.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clearhead.architecture import ModelConfig, Rope
from clearhead.checkpoint.fill import LoadedModel, Progress, fill
from clearhead.checkpoint.tensors import LazyTensors
from clearhead.errors import ClearheadError
from clearhead.families import llama
from clearhead.tokenization import Tokenizer, load_tokenizer

HEADER = struct.Struct("<7i")
LATER_VERSION_MAGIC = 0x616B3432  # "ak42": llama2.c's versions 1 and 2, whose layout differs
FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Llama2cHeader:
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
        return self.width // self.num_heads


@dataclass(frozen=True, kw_only=True)
class Llama2cCheckpoint:
    header: Llama2cHeader
    tensors: Mapping[str, Tensor]


def open_llama2c(path: str | PathLike[str]) -> Llama2cCheckpoint:
    """Check the file's header against its length; the tensors are read later, one at a time."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(HEADER.size)
        file_bytes = path.stat().st_size
    except OSError as error:
        raise ClearheadError(f"cannot read {str(path)!r}: {error.strerror}") from error
    header = _parse_header(path, start)
    layout = _layout(header)
    expected_bytes = HEADER.size + FLOAT_BYTES * sum(count * prod(shape) for _, count, shape in layout)
    if file_bytes != expected_bytes:
        raise ClearheadError(
            f"{str(path)!r} has {file_bytes} bytes where its header asks for {expected_bytes}; "
            "it is cut short, or no llama2.c checkpoint"
        )
    places = _places(layout)
    return Llama2cCheckpoint(header=header, tensors=LazyTensors(places, lambda name: _read(path, *places[name])))


def _read(path: Path, offset_bytes: int, shape: tuple[int, ...]) -> Tensor:
    values = np.fromfile(path, dtype="<f4", count=prod(shape), offset=offset_bytes)
    if len(values) != prod(shape):
        raise ClearheadError(f"{str(path)!r} was cut short while it was being read")
    return torch.from_numpy(values).reshape(shape)


def is_llama2c(path: Path) -> bool:
    try:
        open_llama2c(path)
    except ClearheadError:
        return False
    return True


def load_llama2c(
    path: Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    checkpoint = open_llama2c(path)
    network = fill(
        config_of(checkpoint.header),
        checkpoint.tensors,
        where=str(path),
        names=llama.META_NAMES,
        dtype=dtype,
        device=device,
        progress=progress,
    )
    return LoadedModel(network, family=llama.FAMILY, special_ids={"bos_token_id": 1, "eos_token_id": 2})


def llama2c_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer.bin beside it."""
    vocabulary = path.with_name("tokenizer.bin")
    return load_tokenizer(vocabulary) if vocabulary.is_file() else None


def llama2c_config(path: Path) -> ModelConfig:
    return config_of(open_llama2c(path).header)


def config_of(header: Llama2cHeader) -> ModelConfig:
    return llama.llama(
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
    if width == LATER_VERSION_MAGIC:
        raise ClearheadError(
            f"{str(path)!r} is a llama2.c checkpoint of version {feed_forward_width}; "
            "only version 0 can be read (export.py --version 0)"
        )
    sizes = (width, feed_forward_width, num_layers, num_heads, num_kv_heads, abs(vocab_size), context_length)
    if min(sizes) < 1 or width % (2 * num_heads) or num_heads % num_kv_heads:
        raise ClearheadError(f"{str(path)!r} is no llama2.c checkpoint: its header reads {sizes}")
    return Llama2cHeader(
        width=width,
        feed_forward_width=feed_forward_width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        vocab_size=abs(vocab_size),
        context_length=context_length,
        tied=vocab_size > 0,  # the sign is llama2.c's flag
    )


def _layout(header: Llama2cHeader) -> list[tuple[str, int, tuple[int, ...]]]:
    """(name, how many, shape of one) in file order; a name with `{}` is one tensor for each layer."""
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
        ("", 2, rotary_table),  # cosines and sines, derived from the header: nobody reads them
    ]
    return layout if header.tied else [*layout, ("output.weight", 1, (V, D))]


def _places(layout: list[tuple[str, int, tuple[int, ...]]]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Tensor name -> (offset_bytes, shape)."""
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    offset_bytes = HEADER.size
    for name, count, shape in layout:
        for index in range(count):
            if name:
                places[name.format(index)] = (offset_bytes, shape)
            offset_bytes += FLOAT_BYTES * prod(shape)
    return places
