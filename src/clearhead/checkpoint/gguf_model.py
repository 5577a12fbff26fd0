"""A network from a GGUF file: the strict reader of gguf.py, the words of families/gguf.py.

loaded = load_gguf(Path("model.gguf"))
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock

import torch

from clearhead.architecture import GroupedAttention, ModelConfig, Rope
from clearhead.checkpoint.fill import LoadedModel, Progress, fill
from clearhead.checkpoint.gguf import GgufFile, open_gguf
from clearhead.checkpoint.tensors import LazyTensors
from clearhead.errors import ClearheadError
from clearhead.families import Settings, family_of_type, gguf
from clearhead.tokenization import Tokenizer, from_gguf

TURN = Lock()
# GGUF key -> the name under which transformers' config.json keeps it
TOKENIZER_IDS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}


def load_gguf(
    path: Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """`dtype` None: as the token table is stored, float32 where that is quantised."""
    file = open_gguf(path)
    architecture, table = gguf.architecture_of(file.metadata), file.tensors.get("token_embd.weight")
    if progress is not None:
        progress("", 0, len(file.tensors))
    with one_thread():
        network = fill(
            config_of(file),
            LazyTensors(file.tensors, file.read),
            where=str(path),
            names=architecture.names,
            dropped=gguf.DROPPED,
            dtype=dtype or (None if table is None else table.block_type.dtype),
            device=device,
            progress=progress,
        )
    ids = {name: gguf.as_list(file.metadata.get(key)) for key, name in TOKENIZER_IDS.items()}
    family, special_ids = family_of_type(architecture.model_type), Settings(ids, str(path)).special_ids()
    return LoadedModel(network, family=family, special_ids=special_ids)


@contextmanager
def one_thread() -> Iterator[None]:
    """For many small steps: on busy cores PyTorch's threads wait for each other at each of them.

    The number is the whole process's: of two who load at once, one waits for the other to put it back.
    """
    with TURN:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)


def gguf_tokenizer(path: Path) -> Tokenizer | None:
    metadata = open_gguf(path).metadata
    return from_gguf(metadata) if "tokenizer.ggml.model" in metadata else None


def gguf_config(path: Path) -> ModelConfig:
    return config_of(open_gguf(path))


def config_of(file: GgufFile) -> ModelConfig:
    family = family_of_type(gguf.architecture_of(file.metadata).model_type)
    assert family.read is not None
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    config = family.read(gguf.settings_from(file.metadata, shapes, str(file.path)))
    return with_llama3_scaling(config, file) if "rope_freqs.weight" in shapes else config


def with_llama3_scaling(config: ModelConfig, file: GgufFile) -> ModelConfig:
    assert config.decoder is not None
    attention = config.decoder.layers[0].attention
    if not isinstance(attention, GroupedAttention) or not isinstance(attention.position, Rope):
        raise ClearheadError(f"{file.path} scales rotary positions (rope_freqs.weight) of a model that has none")
    divisors = file.read("rope_freqs.weight").float()
    scaling = gguf.llama3_scaling(divisors, attention.position.theta)
    if scaling is None:
        raise ClearheadError(f"{file.path}: rope_freqs.weight holds a rotary scaling that is not Llama 3's")
    rotated = replace(attention, position=replace(attention.position, scaling=scaling))
    layers = tuple(replace(layer, attention=rotated) for layer in config.decoder.layers)
    return replace(config, decoder=replace(config.decoder, layers=layers))
