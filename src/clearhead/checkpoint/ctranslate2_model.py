"""Load Marian models from CTranslate2 folders.

    loaded = load_ctranslate2(Path("opus-mt-zh-en"))

Marian's decoder starts from a zero vector. As in Hugging Face's version of these models, it is the embedding of a start
token that is appended to the vocabulary; a low logit bias keeps that token from being generated.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from clearhead.architecture import ModelConfig, SinusoidalPositions
from clearhead.checkpoint.assembly import NamingScheme, assemble_network
from clearhead.checkpoint.ctranslate2 import CTranslate2Checkpoint, open_ctranslate2
from clearhead.checkpoint.folder_tokenizer import load_folder_tokenizer
from clearhead.checkpoint.interface import DEFAULT_OPTIONS, LoadOptions, ModelParts
from clearhead.checkpoint.tensors import LazyTensors
from clearhead.errors import ClearheadError, quote
from clearhead.families import CTRANSLATE2_MARIAN, family_of_type, marian_config
from clearhead.model import sinusoids
from clearhead.tokenization import CTRANSLATE2_VOCABULARY, read_marian_vocabulary

WEIGHTS_FILE = "model.bin"
# Tensor -> its value for the start token. The smallest number of float16 is -65504.
_START_TOKEN_VALUES = {CTRANSLATE2_MARIAN.token_table: 0.0, CTRANSLATE2_MARIAN.logit_bias: -1e4}
_SPEC, _REVISION = "TransformerSpec", 7
_SIZE_SUFFIXES = ("/bias", "/encodings")  # endings of the small tensors that together determine all sizes
# Setting in config.json -> the values that have no effect. CTranslate2's default epsilon is 1e-5.
_HARMLESS = {
    "layer_norm_epsilon": (None, 1e-5),
    "add_source_bos": (None, False),
    "multi_query_attention": (None, False),
}


def is_ctranslate2(folder: Path) -> bool:
    """Return whether the folder's model.bin begins with a version and the name of a spec."""
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return b"Spec\0" in file.read(64)


def load_ctranslate2(folder: Path, options: LoadOptions = DEFAULT_OPTIONS) -> ModelParts:
    """Load a Marian model. The default dtype is that of the matrices, or float32 if they are quantized."""
    checkpoint, where = open_ctranslate2(folder), str(folder / WEIGHTS_FILE)
    config = config_of(folder, checkpoint)
    tensors = _with_start_token(checkpoint, where)
    _check_positions(tensors, config.width, where)
    naming = NamingScheme(table=CTRANSLATE2_MARIAN.tensor_names, ignored_tensors=CTRANSLATE2_MARIAN.ignored_tensors)
    options = replace(options, dtype=options.dtype or _matrix_dtype(checkpoint))
    network = assemble_network(config, tensors, where, naming, options)
    special_ids = read_special_ids(folder, checkpoint, config)
    return ModelParts(network, load_folder_tokenizer(folder), family_of_type("marian"), special_ids)


def _with_start_token(checkpoint: CTranslate2Checkpoint, where: str) -> LazyTensors[Tensor]:
    """Return the tensors of a checkpoint with an entry for the start token, and without aliases of the token table."""
    for alias, table in CTRANSLATE2_MARIAN.aliases.items():
        if checkpoint.aliases.get(alias) != table:
            raise ClearheadError(
                f"{where}: {alias} is not the same tensor as {table}; only Marian models with one table are supported"
            )

    def read(name: str) -> Tensor:
        tensor = checkpoint.tensors[name]
        if name in _START_TOKEN_VALUES and tensor.is_floating_point():
            return torch.cat((tensor, tensor.new_full((1, *tensor.shape[1:]), _START_TOKEN_VALUES[name])))
        return tensor

    return LazyTensors(checkpoint.tensors.keys() - CTRANSLATE2_MARIAN.aliases.keys(), read)


def read_ctranslate2_config(folder: Path) -> ModelConfig:
    """Return the config of a folder; of the tensors, only small ones are read."""
    return config_of(folder, open_ctranslate2(folder))


def config_of(folder: Path, checkpoint: CTranslate2Checkpoint) -> ModelConfig:
    """Return the config of a Marian model; raise ClearheadError if the checkpoint holds another kind of model."""
    where = str(folder / WEIGHTS_FILE)
    if (checkpoint.spec, checkpoint.revision) != (_SPEC, _REVISION):
        found = f"{checkpoint.spec} of revision {checkpoint.revision}"
        raise ClearheadError(f"{where} holds a {found}; only a {_SPEC} of revision {_REVISION} can be loaded")
    for name, harmless_values in _HARMLESS.items():
        value = checkpoint.config.get(name)
        if value not in harmless_values:
            raise ClearheadError(f"{folder / 'config.json'}: {name} is {quote(value)}, which Marian models do not have")
    shapes = {
        name: tuple(checkpoint.tensors[name].shape) for name in checkpoint.tensors if name.endswith(_SIZE_SUFFIXES)
    }
    return marian_config(checkpoint.settings, shapes, where)


def _matrix_dtype(checkpoint: CTranslate2Checkpoint) -> torch.dtype:
    """Return the dtype of the matrices, or float32 if they are quantized."""
    matrix = checkpoint.tensors.get("encoder/layer_0/ffn/linear_0/weight")
    return torch.float32 if matrix is None or not matrix.is_floating_point() else matrix.dtype


def _check_positions(tensors: Mapping[str, Tensor], width: int, where: str) -> None:
    """Raise ClearheadError unless the stored position encodings are the sinusoids that we compute, up to rounding."""
    for name in CTRANSLATE2_MARIAN.positions.values():
        stored = tensors[name]
        fits = stored.ndim == 2 and stored.shape[1] == width  # checked before a table of that length is computed
        computed = sinusoids(
            torch.arange(len(stored) if fits else 0), width, SinusoidalPositions(layout="halves"), torch.float32
        )
        rounding = torch.finfo(stored.dtype).eps if stored.is_floating_point() else 0.0
        if not fits or not (stored.float() - computed).abs().max() <= max(1e-6, rounding):
            raise ClearheadError(f"{where}: {name} is not the sinusoidal table of Marian models: sines, then cosines")


def read_special_ids(folder: Path, checkpoint: CTranslate2Checkpoint, config: ModelConfig) -> dict[str, int]:
    """Return the special ids under transformers' names; the start token follows the vocabulary."""
    path = folder / CTRANSLATE2_VOCABULARY
    tokens = read_marian_vocabulary(path)
    assert config.decoder is not None
    start_id = config.decoder.token_embedding.vocab_size - 1
    if len(tokens) != start_id:
        raise ClearheadError(f"{path} has {len(tokens)} tokens, but the model has {start_id}")
    end_token = checkpoint.config.get("eos_token", "</s>")
    if end_token not in tokens:
        raise ClearheadError(f"{path} lacks the end-of-text token {quote(end_token)}")
    return {"decoder_start_token_id": start_id, "eos_token_id": tokens.index(end_token), "pad_token_id": start_id}
