"""Load models from GGUF files.

    loaded = load_gguf(Path("model.gguf"), LoadOptions(weights="stored"))

The header is parsed once, for config, weights and tokenizer. With stored weights, matrices of the block types that the
kernels can use (gguf_packing.py) are never dequantized; on a GPU, quants of 5 and 6 bits take 8.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from clearhead.architecture import ModelConfig, Pooling, SentenceConfig
from clearhead.backends import PackedWeight, widen
from clearhead.checkpoint.assembly import NamingScheme, assemble_network
from clearhead.checkpoint.gguf import GgufFile, open_gguf
from clearhead.checkpoint.gguf_packing import STORED_BLOCK_TYPES, pack_blocks
from clearhead.checkpoint.gguf_parts import assembled_tensors
from clearhead.checkpoint.gguf_rotary import with_rotary_scaling
from clearhead.checkpoint.interface import DEFAULT_OPTIONS, LoadOptions, ModelParts
from clearhead.families import Settings, family_of_type, gguf_architecture, gguf_settings, to_plain_value
from clearhead.model import SentencePooler, Transformer
from clearhead.tokenization import Tokenizer, tokenizer_from_gguf

TOKEN_TABLE = "token_embd.weight"
POOLING_KEY, POOLING_MODES = "pooling_type", {1: "mean", 2: "cls", 3: "last"}  # llama.cpp's numbers; 4 ranks texts
_THREAD_COUNT_LOCK = Lock()
# GGUF key -> key in transformers' config.json
SPECIAL_ID_KEYS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}


def load_gguf(path: Path, options: LoadOptions = DEFAULT_OPTIONS) -> ModelParts:
    """Load a GGUF file. Without a dtype in `options`, that of the token table is used: float32 if it is quantized."""
    file = open_gguf(path)
    architecture, table = gguf_architecture(file.metadata, file.tensors), file.tensors.get(TOKEN_TABLE)
    if options.dtype is None and table is not None:
        options = replace(options, dtype=table.block_type.dtype)
    if options.progress is not None:
        options.progress("", 0, len(file.tensors))
    on_cpu = options.device is None or torch.device(options.device).type == "cpu"
    read = partial(_read_stored, file, wide=not on_cpu) if options.weights == "stored" else file.read
    rotary = tuple(map(re.escape, architecture.rotary_tensors))  # they are part of the config
    naming = NamingScheme(table=architecture.tensor_names, ignored_tensors=architecture.ignored_tensors + rotary)
    # Packing works on large pieces, which several threads share well.
    with _single_thread() if options.bits is None else nullcontext():
        tensors = assembled_tensors(file, architecture, read)
        network = assemble_network(config_of(file), tensors, str(path), naming, options)
    ids = {name: to_plain_value(file.metadata.get(key)) for key, name in SPECIAL_ID_KEYS.items()}
    ids["decoder_start_token_id"] = to_plain_value(file.metadata.get("t5.decoder_start_token_id"))
    special_ids = Settings(ids, str(path)).special_ids()
    sentence = _sentence_of(file, network)
    return ModelParts(network, _tokenizer_of(file), family_of_type(architecture.model_type), special_ids, sentence)


def _read_stored(file: GgufFile, name: str, *, wide: bool) -> Tensor | PackedWeight:
    """Return a matrix with its quantized blocks if kernels can use them, and any other tensor as numbers.

    wide: for the kernels of a GPU, which need quants of 5 and 6 bits in 8.
    """
    tensor = file.tensors[name]
    if len(tensor.shape) < 2 or tensor.block_type.name not in STORED_BLOCK_TYPES:
        return file.read(name)
    num_rows = math.prod(tensor.shape[:-1])  # experts (E, N, K) become E · N rows
    packed = pack_blocks(file.read_blocks(name), num_rows, tensor.block_type)
    if packed is None:
        return file.read(name)
    return widen(packed) if wide else packed


@contextmanager
def _single_thread() -> Iterator[None]:
    """Run PyTorch on one thread: for many small operations its threads would mostly wait for each other on busy cores.

    The number of threads belongs to the whole process, so a lock lets only one load at a time change and restore it.
    """
    with _THREAD_COUNT_LOCK:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)


def _sentence_of(file: GgufFile, network: Transformer) -> SentencePooler | None:
    """Return how texts become vectors, if the file says so; as llama.cpp's programs do, they get the length 1."""
    number = to_plain_value(file.metadata.get(f"{file.metadata['general.architecture']}.{POOLING_KEY}"))
    mode = POOLING_MODES.get(number) if isinstance(number, int) else None
    if mode is None:
        return None
    config = SentenceConfig(width=network.config.width, pooling=Pooling(modes=(mode,)))
    return SentencePooler(config).to(device=network.device).eval()


def _tokenizer_of(file: GgufFile) -> Tokenizer | None:
    """Return the tokenizer in a file's metadata, or None if there is none."""
    return tokenizer_from_gguf(file.metadata) if "tokenizer.ggml.model" in file.metadata else None


def read_gguf_config(path: Path) -> ModelConfig:
    """Return the config of a GGUF file without reading its weights."""
    return config_of(open_gguf(path))


def config_of(file: GgufFile) -> ModelConfig:
    """Return the config that a file's metadata and tensors describe."""
    family = family_of_type(gguf_architecture(file.metadata, file.tensors).model_type)
    assert family.read_config is not None
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    config = family.read_config(gguf_settings(file.metadata, shapes, str(file.path)))
    return with_rotary_scaling(config, file)
