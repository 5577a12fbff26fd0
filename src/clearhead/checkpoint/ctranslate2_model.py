"""A network from a CTranslate2 folder of a Marian model: the strict reader of ctranslate2.py, the words of families/.

    loaded = load_ctranslate2(Path("opus-mt-zh-en"))

The decoder starts from a zero vector. It is the row of one token more than the vocabulary has, as in Hugging Face's
form of these models; a low logit bias keeps that token from ever being generated.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from clearhead.architecture import ModelConfig, SinusoidalPositions
from clearhead.checkpoint.ctranslate2 import CTranslate2Checkpoint, open_ctranslate2
from clearhead.checkpoint.fill import LoadedModel, Progress, fill
from clearhead.checkpoint.tensors import LazyTensors
from clearhead.errors import ClearheadError
from clearhead.families import bart, ctranslate2
from clearhead.model import sinusoids
from clearhead.tokenization import CTRANSLATE2_VOCABULARY, read_vocabulary

WEIGHTS = "model.bin"
# The entry of the token to start from; float16 reaches down to -65504
ONE_MORE = {ctranslate2.TABLE: 0.0, ctranslate2.LOGIT_BIAS: -1e4}
SPEC, REVISION = "TransformerSpec", 7
SMALL = ("/bias", "/encodings")  # endings of tensors that tell every size and are read in no time
# Settings in config.json -> the values that change nothing. 1e-5 is CTranslate2's own where none is given.
HARMLESS = {"layer_norm_epsilon": (None, 1e-5), "add_source_bos": (None, False), "multi_query_attention": (None, False)}


def tensors_of(checkpoint: CTranslate2Checkpoint, where: str) -> LazyTensors:
    """The file's tensors with a row for the token to start from, and without second names of the token table."""
    for alias, table in ctranslate2.SHARED.items():
        if checkpoint.aliases.get(alias) != table:
            raise ClearheadError(f"{where}: {alias} is not {table}; Marian models with one table can be loaded")

    def read(name: str) -> Tensor:
        tensor = checkpoint.tensors[name]
        if name in ONE_MORE and tensor.is_floating_point():
            return torch.cat((tensor, tensor.new_full((1, *tensor.shape[1:]), ONE_MORE[name])))
        return tensor

    return LazyTensors(checkpoint.tensors.keys() - ctranslate2.SHARED.keys(), read)


def is_ctranslate2(folder: Path) -> bool:
    """Whether the folder's model.bin opens with a version and the name of a spec."""
    path = folder / WEIGHTS
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return b"Spec\0" in file.read(64)


def load_ctranslate2(
    folder: Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """`dtype` None: as the matrices are stored, float32 where they are quantised."""
    checkpoint, where = open_ctranslate2(folder), str(folder / WEIGHTS)
    config = config_of(folder, checkpoint)
    tensors = tensors_of(checkpoint, where)
    check_positions(tensors, config.width, where)
    network = fill(
        config,
        tensors,
        where=where,
        names=ctranslate2.NAMES,
        dropped=ctranslate2.DROPPED,
        dtype=dtype or stored_dtype(checkpoint),
        device=device,
        progress=progress,
    )
    return LoadedModel(network, family=bart.FAMILY, special_ids=special_ids(folder, checkpoint, config))


def ctranslate2_config(folder: Path) -> ModelConfig:
    return config_of(folder, open_ctranslate2(folder))


def config_of(folder: Path, checkpoint: CTranslate2Checkpoint) -> ModelConfig:
    where = str(folder / WEIGHTS)
    if (checkpoint.spec, checkpoint.revision) != (SPEC, REVISION):
        held = f"{checkpoint.spec} of revision {checkpoint.revision}"
        raise ClearheadError(f"{where} holds a {held}; a {SPEC} of revision {REVISION} can be loaded")
    for name, harmless in HARMLESS.items():
        value = checkpoint.config.get(name)
        if value not in harmless:
            raise ClearheadError(f"{folder / 'config.json'}: {name} is {value!r}, which Marian models do not have")
    shapes = {name: tuple(checkpoint.tensors[name].shape) for name in checkpoint.tensors if name.endswith(SMALL)}
    return ctranslate2.marian_config(checkpoint.settings, shapes, where)


def stored_dtype(checkpoint: CTranslate2Checkpoint) -> torch.dtype:
    matrix = checkpoint.tensors.get("encoder/layer_0/ffn/linear_0/weight")
    return torch.float32 if matrix is None or not matrix.is_floating_point() else matrix.dtype


def check_positions(tensors: Mapping[str, Tensor], width: int, where: str) -> None:
    """What the file adds to embeddings is what we compute instead, up to rounding."""
    for stack in ("encoder", "decoder"):
        name = ctranslate2.POSITIONS.format(stack=stack)
        stored = tensors[name]
        fits = stored.ndim == 2 and stored.shape[1] == width  # before a table of that length is made
        ours = sinusoids(
            torch.arange(len(stored) if fits else 0), width, SinusoidalPositions(layout="halves"), torch.float32
        )
        rounding = torch.finfo(stored.dtype).eps if stored.is_floating_point() else 0.0
        if not fits or not (stored.float() - ours).abs().max() <= max(1e-6, rounding):
            raise ClearheadError(f"{where}: {name} is not a table of sines, then cosines, as Marian models have")


def special_ids(folder: Path, checkpoint: CTranslate2Checkpoint, config: ModelConfig) -> dict[str, int]:
    """By transformers' names; the token to start from comes after those of the vocabulary."""
    path = folder / CTRANSLATE2_VOCABULARY
    tokens = read_vocabulary(path)
    assert config.decoder is not None
    start = config.decoder.embedding.vocab_size - 1
    if len(tokens) != start:
        raise ClearheadError(f"{path} has {len(tokens)} tokens, but the model {start}")
    end = checkpoint.config.get("eos_token", "</s>")
    if end not in tokens:
        raise ClearheadError(f"{path} lacks {end!r}, which ends a text")
    return {"decoder_start_token_id": start, "eos_token_id": tokens.index(end), "pad_token_id": start}
