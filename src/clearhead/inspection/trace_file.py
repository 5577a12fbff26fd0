"""Save and load the record of a trace as one safetensors file: tensors by name, the rest as JSON in the metadata.

    decoder.states.3             residual stream (T, D), from 0 to the number of layers
    decoder.3.queries            (1, N, T, H), and .keys, .values; cross.3.queries if there is a source
    decoder.3.mask               and .bias, .temperature if the layer has them
    decoder.tokens               (1, T), and .mask, .positions, .documents, .token_types if they were given

Files are not trusted: all shapes are checked against the model config in the file before anything is computed.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.architecture import ModelConfig
from clearhead.config import from_dict, to_dict
from clearhead.errors import ClearheadError
from clearhead.files import parse_json
from clearhead.inspection.attention_heads import AttentionHeads
from clearhead.inspection.recording import StackInputs
from clearhead.inspection.trace_record import TraceRecord
from clearhead.model import Mask, Scoring, Transformer
from clearhead.tensor_files import read_safetensors, write_safetensors

FORMAT = 1
_METADATA_KEY = "clearhead.trace"


@dataclass(frozen=True, kw_only=True)
class _LayerScoring:
    """The scalar fields of a Scoring; its tensors are stored beside the keys."""

    scale: float
    softcap: float | None = None
    causal: bool = False


@dataclass(frozen=True, kw_only=True)
class _Scorings:
    """The scoring of every layer of each kind of attention."""

    encoder: tuple[_LayerScoring, ...] = ()
    decoder: tuple[_LayerScoring, ...] = ()
    cross: tuple[_LayerScoring, ...] = ()


def save_record(record: TraceRecord, path: Path) -> Path:
    """Write a record that has all residual streams and heads to a .safetensors file; return its path."""
    tensors: dict[str, Tensor | None] = {}
    for name, residuals in record.residuals.items():
        tensors |= {f"{name}.states.{depth}": stream for depth, stream in residuals.items()}
        tensors |= {f"{name}.{part}": tensor for part, tensor in vars(record.inputs[name]).items()}
    scorings = {}
    for name, layers in record.heads.items():
        for number, heads in enumerate(layers):
            tensors |= {f"{name}.{number}.{part}": tensor for part, tensor in _head_tensors(heads).items()}
        scorings[name] = tuple(_layer_scoring(heads.scoring) for heads in layers)
    metadata = {
        "format": FORMAT,
        "model": to_dict(record.config),
        "scoring": to_dict(_Scorings(**scorings)),
        "token_texts": record.token_texts,
        "source_texts": record.source_texts,
    }
    present = {name: tensor.contiguous().clone().cpu() for name, tensor in tensors.items() if tensor is not None}
    write_safetensors(path, present, {_METADATA_KEY: json.dumps(metadata)})
    return path


def _head_tensors(heads: AttentionHeads) -> dict[str, Tensor | None]:
    """Return the tensors of one attention layer, by their names in the file."""
    scoring = heads.scoring
    projections = {"queries": heads.queries, "keys": heads.keys, "values": heads.values}
    extras = {name: getattr(scoring, name) for name in ("bias", "temperature", "sinks")}
    return projections | {"mask": scoring.mask.allowed} | extras


def _layer_scoring(scoring: Scoring) -> _LayerScoring:
    return _LayerScoring(scale=scoring.scale, softcap=scoring.softcap, causal=scoring.mask.causal)


def load_record(path: Path, network: Transformer | None) -> TraceRecord:
    """Read a record from a file; the network, if given, must be the one that was traced."""
    return _TraceReader.open(path, "cpu" if network is None else str(network.device)).read(network)


@dataclass(frozen=True)
class _TraceReader:
    """The content of a trace file. Every method raises ClearheadError with the part of the file that is wrong."""

    path: Path
    config: ModelConfig
    scorings: _Scorings
    texts: dict[str, list[str]]
    tensors: dict[str, Tensor]

    @staticmethod
    def open(path: Path, device: str) -> "_TraceReader":
        """Read the tensors and the metadata of a file."""
        if not path.is_file():
            raise ClearheadError(f"{path} does not exist; trace.save(path) writes a trace")
        stored, texts_by_key = read_safetensors(path)
        metadata = parse_json(texts_by_key.get(_METADATA_KEY, "null"), f"the metadata of {path} is ")
        tensors = {name: tensor.to(device) for name, tensor in stored.items()}
        if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
            raise ClearheadError(f"{path} is not a trace of format {FORMAT}; trace.save(path) writes one")
        texts = {name: metadata.get(name) or [] for name in ("token_texts", "source_texts")}
        for name, value in texts.items():
            if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
                raise ClearheadError(f"{path}: {name} must be a list of strings")
        config = from_dict(ModelConfig, metadata.get("model"), f"{path}: model")
        scorings = from_dict(_Scorings, metadata.get("scoring"), f"{path}: scoring")
        return _TraceReader(path, config, scorings, texts, tensors)

    def read(self, network: Transformer | None) -> TraceRecord:
        """Return the record, after checking that all of it fits the config in the file."""
        if network is not None and network.config != self.config:
            raise ClearheadError(f"{self.path} is a trace of another model than the one given")
        if network is not None:
            self.check_dtype(next(network.parameters()).dtype)
        names = [name for name in ("encoder", "decoder") if getattr(self.config, name) is not None]
        inputs = {name: self.inputs(name) for name in names}
        tokens = {name: inputs[name].tokens[0].tolist() for name in names}
        lengths = {name: len(tokens[name]) for name in names}
        has_source = self.config.is_encoder_decoder
        kinds = [*names, "cross"] if has_source else names
        record = TraceRecord(
            config=self.config,
            tokens=tokens[names[-1]],
            token_texts=self.texts["token_texts"],
            residuals={name: self.residuals(name, lengths[name]) for name in names},
            source_tokens=tokens["encoder"] if has_source else None,
            source_texts=self.texts["source_texts"] if has_source else None,
            heads={kind: self.heads(kind, lengths) for kind in kinds},
            inputs=inputs,
        )
        self.require(len(record.token_texts) == len(record.tokens), "token_texts must have one text per token")
        self.require(
            len(record.source_texts or ()) == len(record.source_tokens or ()),
            "source_texts must have one text per source token",
        )
        return record

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise ClearheadError if the residual streams are not of the dtype of the network."""
        for name, tensor in self.tensors.items():
            same = tensor.dtype == dtype or ".states." not in name
            self.require(same, f"{name} has dtype {tensor.dtype}; load the model in that dtype, not in {dtype}")

    def inputs(self, name: str) -> StackInputs:
        """Return the inputs of one stack."""
        tokens = self.tensor(f"{name}.tokens")
        fits = tokens.ndim == 2 and tokens.shape[0] == 1 and tokens.numel() > 0 and tokens.dtype == torch.int64
        self.require(fits, f"{name}.tokens must have shape (1, T) and dtype int64")
        parts: dict[str, Any] = {part.name: self.tensors.get(f"{name}.{part.name}") for part in fields(StackInputs)}
        for part, tensor in parts.items():
            fits = tensor is None or (tensor.shape == tokens.shape and not tensor.is_floating_point())
            self.require(fits, f"{name}.{part} must be integers in the shape of the tokens")
        return StackInputs(**parts)

    def residuals(self, name: str, length: int) -> dict[int, Tensor]:
        """Return the residual streams of one stack by depth."""
        depths = range(len(getattr(self.config, name).layers) + 1)
        streams = {depth: self.tensor(f"{name}.states.{depth}") for depth in depths}
        shape = (length, self.config.width)
        fits = all(stream.shape == shape and stream.is_floating_point() for stream in streams.values())
        self.require(fits, f"{name}.states have a wrong shape or dtype")
        return streams

    def heads(self, kind: str, lengths: dict[str, int]) -> list[AttentionHeads]:
        """Return the heads of all layers of one kind of attention: encoder, decoder or cross."""
        stack = "decoder" if kind == "cross" else kind
        layers, scorings = getattr(self.config, stack).layers, getattr(self.scorings, kind)
        num_keys = lengths["encoder" if kind == "cross" else kind]
        self.require(len(scorings) == len(layers), f"scoring.{kind} must have {len(layers)} layers")
        all_heads = []
        for number, (layer, scoring) in enumerate(zip(layers, scorings, strict=True)):
            attention = layer.cross_attention if kind == "cross" else layer.attention
            scores_shape = (1, attention.num_heads, lengths[stack], num_keys)
            heads = self.layer_heads(f"{kind}.{number}", scores_shape, scoring)
            value_width = attention.value_width or attention.head_width
            self.require(heads.values.shape[3] == value_width, f"{kind}.{number}.values have a wrong shape")
            all_heads.append(heads)
        return all_heads

    def layer_heads(
        self, prefix: str, scores_shape: tuple[int, int, int, int], scoring: _LayerScoring
    ) -> AttentionHeads:
        """Return the heads of one layer; scores_shape is (1, N, T, S)."""
        queries, keys, values = (self.tensor(f"{prefix}.{part}") for part in ("queries", "keys", "values"))
        _, num_heads, num_queries, num_keys = scores_shape
        fits = queries.ndim == keys.ndim == values.ndim == 4 and keys.shape[:3] == values.shape[:3]
        self.require(fits and queries.shape[:3] == (1, num_heads, num_queries), f"{prefix}.queries have a wrong shape")
        kv_heads = keys.shape[1]
        fits = keys.shape == (1, kv_heads, num_keys, queries.shape[3]) and kv_heads > 0 and num_heads % kv_heads == 0
        self.require(fits, f"{prefix}.keys have a wrong shape")
        fits = queries.is_floating_point() and queries.dtype == keys.dtype == values.dtype
        self.require(fits, f"{prefix}.queries, keys and values must have one floating-point dtype")
        extras: dict[str, Any] = {
            part: self.tensors.get(f"{prefix}.{part}") for part in ("mask", "bias", "temperature")
        }
        for part, tensor in extras.items():
            fits = tensor is None or _is_broadcastable(tensor, scores_shape)
            self.require(fits, f"{prefix}.{part} has a wrong shape")
        extras["sinks"] = self.tensors.get(f"{prefix}.sinks")
        fits = extras["sinks"] is None or extras["sinks"].shape == (num_heads,)
        self.require(fits, f"{prefix}.sinks have a wrong shape")
        mask = extras.pop("mask")
        self.require(mask is None or mask.dtype == torch.bool, f"{prefix}.mask must have dtype bool")
        kernel_scoring = Scoring(Mask(mask, causal=scoring.causal), scoring.scale, scoring.softcap, **extras)
        return AttentionHeads(queries, keys, values, kernel_scoring)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of the file by name."""
        if name not in self.tensors:
            raise ClearheadError(f"{self.path} has no tensor {name}; save the trace again")
        return self.tensors[name]

    def require(self, condition: bool, message: str) -> None:
        """Raise ClearheadError with the message and the path of the file unless the condition holds."""
        if not condition:
            raise ClearheadError(f"{self.path} is damaged: {message}; save the trace again")


def _is_broadcastable(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether every dimension of the tensor has the size in `shape`, or 1."""
    return tensor.ndim == len(shape) and all(a in (1, b) for a, b in zip(tensor.shape, shape, strict=True))
