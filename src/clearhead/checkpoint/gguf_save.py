"""Save models as GGUF files, which llama.cpp reads.

    save_gguf(Path("model.gguf"), network, tokenizer, file_type="q4_k_m")

A file type names the block type of most matrices. Sensitive matrices get more bits, by the rules of llama.cpp's
quantizer (llama-quant.cpp): the logit head, and in the M types half of the value and down projections. Rows whose
length is not a multiple of 256 do not fit a K format and get the next larger format with blocks of 32. Vectors stay
float32.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.architecture import LearnedPositions, ModelConfig, Normalize, SentenceConfig
from clearhead.backends import gets_more_bits, is_packed
from clearhead.checkpoint.gguf_model import POOLING_KEY, POOLING_MODES, SPECIAL_ID_KEYS
from clearhead.checkpoint.gguf_parts import divided_rules, numbers_in_metadata
from clearhead.checkpoint.gguf_quantizers import quantize
from clearhead.checkpoint.gguf_rotary import rotary_tensors
from clearhead.checkpoint.gguf_writer import TensorPlan, write_gguf
from clearhead.checkpoint.interface import Progress
from clearhead.checkpoint.placement import stored_tensors
from clearhead.errors import ClearheadError, unknown_name
from clearhead.families import (
    GGUF_ARCHITECTURES,
    Family,
    TensorRule,
    expand_table,
    family_of_type,
    gguf_metadata,
)
from clearhead.model import SentencePooler, Transformer
from clearhead.tokenization import Tokenizer, tokenizer_to_gguf

# file type -> (most matrices, the logit head, sensitive projections, fused projections, llama.cpp's number of the type)
_FILE_TYPES = {
    "f16": ("F16", "F16", "F16", "F16", 1),
    "bf16": ("BF16", "BF16", "BF16", "BF16", 32),
    "q8_0": ("Q8_0", "Q8_0", "Q8_0", "Q8_0", 7),
    "q6_k": ("Q6_K", "Q6_K", "Q6_K", "Q6_K", 18),
    "q5_k_m": ("Q5_K", "Q6_K", "Q6_K", "Q6_K", 17),
    "q4_k_m": ("Q4_K", "Q6_K", "Q6_K", "Q5_K", 15),
    "q4_0": ("Q4_0", "Q6_K", "Q4_0", "Q4_0", 2),
}
GGUF_FILE_TYPES = tuple(_FILE_TYPES)
"""What `save_gguf` can write, from large to small."""

_NARROW_TYPES = {"Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0"}  # for rows whose length is not a multiple of 256
_UNQUANTIZED = ("position_embd.weight", "token_types.weight")
_UNQUANTIZED_ENDS = (".bias", "_norm.weight", "ffn_gate_inp.weight", "attn_rel_b.weight")
_QUANTIZATION_VERSION = 2


def save_gguf(
    path: Path,
    network: Transformer,
    tokenizer: Tokenizer | None,
    *,
    file_type: str = "q8_0",
    special_ids: Mapping[str, Any] | None = None,
    importance: Mapping[str, Tensor] | None = None,
    sentence: SentencePooler | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a GGUF file atomically. `importance`: our name of a linear layer's weight -> weights of its columns.

    Of how texts become vectors, `sentence`, a file holds the pooling of hidden states. An encoder is written without
    its pooler and language head, which llama.cpp does not have.
    """
    if file_type not in _FILE_TYPES:
        raise unknown_name("GGUF type", file_type, _FILE_TYPES)
    if is_packed(network):
        raise ClearheadError("packed weights cannot be written to a GGUF file; load the model with full weights")
    config, tensors = _without_heads(network)
    rotary = rotary_tensors(config)
    metadata, rules = _describe(config, tensors, rotary)
    metadata |= {
        "general.name": path.stem,
        "general.file_type": _FILE_TYPES[file_type][4],
        "general.quantization_version": _QUANTIZATION_VERSION,
    }
    if sentence is not None or config.decoder is None:
        metadata[f"{metadata['general.architecture']}.{POOLING_KEY}"] = _pooling_number(sentence)
    if tokenizer is not None:
        metadata |= tokenizer_to_gguf(tokenizer, network.config.vocab_size)
    for key, name in SPECIAL_ID_KEYS.items():
        token_id = (special_ids or {}).get(name)
        token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
        if isinstance(token_id, int):
            metadata.setdefault(key, token_id)
    plans = _plan_tensors(config, tensors, rules, file_type, importance or {})
    for name, numbers in rotary.items():
        plans.append(TensorPlan(name, tuple(numbers.shape), "F32", partial(numbers.view, torch.uint8)))
    write_gguf(path, metadata, plans, progress)


def _without_heads(network: Transformer) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return config and tensors of a network; of an encoder, those that make hidden states.

    RoBERTa's positions lose the rows before the first one in use, so that the network is that of a BERT.
    """
    config, tensors = network.config, stored_tensors(network)
    if config.decoder is not None:
        return config, tensors
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(("pooler.", "head."))}
    config = replace(config, head=None, pooler=False)
    embedding = config.output_stack.token_embedding
    positions = embedding.positions
    if isinstance(positions, LearnedPositions) and positions.offset:
        name = "encoder.embedding.positions.weight"
        kept[name] = kept[name][positions.offset :]
        embedding = replace(embedding, positions=replace(positions, offset=0))
        config = replace(config, encoder=replace(config.output_stack, embedding=embedding))
    return config, kept


def _pooling_number(sentence: SentencePooler | None) -> int:
    """Return llama.cpp's number of a pooling mode; without one, the mean."""
    config = SentenceConfig() if sentence is None else sentence.config
    modes, steps = config.pooling.modes, config.steps
    number = next((number for number, mode in POOLING_MODES.items() if modes == (mode,)), None)
    if number is None or any(not isinstance(step, Normalize) for step in steps):
        raise ClearheadError("a GGUF file cannot express how this model pools hidden states; use --to huggingface")
    return number


def _describe(
    config: ModelConfig, tensors: Mapping[str, Tensor], rotary: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, TensorRule]]:
    """Return the metadata of the first architecture that can express a network, and the rules of its tensors.

    `rotary` are further tensors, which belong to the config.
    """
    own_names = set(tensors)
    for name, architecture in GGUF_ARCHITECTURES.items():
        family: Family = family_of_type(architecture.model_type)
        rules = dict(expand_table(architecture.tensor_names, config, own_names))
        covered = [own_name for rule in rules.values() for own_name in rule.own_names]
        if set(covered) != own_names or len(covered) != len(own_names):
            continue
        shapes = {foreign: _shape(rule, tensors, config) for foreign, rule in rules.items()}
        shapes |= {foreign: tuple(numbers.shape) for foreign, numbers in rotary.items()}
        try:
            metadata = gguf_metadata(config, name, family, shapes)
            metadata |= numbers_in_metadata(architecture, rules, tensors)
            return metadata, divided_rules(architecture, rules)
        except ClearheadError:
            continue
    raise ClearheadError(
        "no GGUF architecture of llama.cpp expresses this model (docs/models.md says which model types have one, and "
        "why others have none); use --to huggingface instead"
    )


def _shape(rule: TensorRule, tensors: Mapping[str, Tensor], config: ModelConfig) -> tuple[int, ...]:
    """Return the shape of a foreign tensor without computing it."""
    parts = [torch.empty_like(tensors[name], device="meta") for name in rule.own_names]
    return tuple(rule.join(parts, config).shape)


def _plan_tensors(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    rules: Mapping[str, TensorRule],
    file_type: str,
    importance: Mapping[str, Tensor],
) -> list[TensorPlan]:
    num_layers = len(config.output_stack.layers)
    is_tied = "output.weight" not in rules
    plans = []
    for name, rule in rules.items():
        shape = _shape(rule, tensors, config)
        is_head = name == "output.weight" or (is_tied and name == "token_embd.weight")
        block_type = _block_type(name, shape, file_type, num_layers, is_head=is_head)
        weights = next((importance[own_name] for own_name in rule.own_names if own_name in importance), None)
        make = partial(_make_blocks, config, [tensors[own] for own in rule.own_names], rule, block_type, weights)
        plans.append(TensorPlan(name, shape, block_type, make))
    return plans


def _block_type(name: str, shape: tuple[int, ...], file_type: str, num_layers: int, *, is_head: bool) -> str:
    """Return the block type of a tensor."""
    most, head, sensitive, fused, _ = _FILE_TYPES[file_type]
    if len(shape) < 2 or name in _UNQUANTIZED or name.endswith(_UNQUANTIZED_ENDS):
        return "F32"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if is_head:
        block_type = head
    elif (
        match is not None
        and match[2] in ("attn_v", "ffn_down", "ffn_down_exps")
        and gets_more_bits(int(match[1]), num_layers)
    ):
        block_type = sensitive
    else:
        block_type = fused if match is not None and match[2] == "attn_qkv" else most
    if block_type.endswith("_K") and shape[-1] % 256:
        block_type = _NARROW_TYPES[block_type]
    return "F16" if block_type.startswith("Q") and shape[-1] % 32 else block_type


def _make_blocks(
    config: ModelConfig, parts: list[Tensor], rule: TensorRule, block_type: str, importance: Tensor | None
) -> Tensor:
    joined = rule.join([part.detach().cpu() for part in parts], config)
    matrix = joined.reshape(-1, joined.shape[-1])
    if importance is not None and importance.shape[-1] != matrix.shape[-1]:
        importance = None  # a transposed part of the matrix
    return quantize(matrix, block_type, importance)
