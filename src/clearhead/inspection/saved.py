"""A trace as one safetensors file: tensors by name, the rest as JSON in the header's metadata.

    decoder.states.3             (T, D), from 0 to the number of layers
    decoder.3.queries            (1, N, T, H), and .keys, .values; cross.3.queries where there is a source
    decoder.3.mask               and .bias, .temperature where the layer has them
    decoder.tokens               (1, T), and .mask, .positions, .documents, .token_types where they were given

Nothing in a file is trusted: shapes are checked against the model it describes before anything is computed.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from clearhead.architecture import ModelConfig
from clearhead.config import from_dict, to_dict
from clearhead.errors import ClearheadError
from clearhead.files import check_output, parse_json, write_safetensors
from clearhead.inspection.heads import Heads
from clearhead.inspection.record import Inputs
from clearhead.inspection.trace import Trace
from clearhead.model import Mask, Scoring, Transformer

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class LayerScoring:
    """The numbers of a Scoring; its tensors lie beside the keys."""

    scale: float
    softcap: float | None = None
    causal: bool = False


@dataclass(frozen=True, kw_only=True)
class Scorings:
    encoder: tuple[LayerScoring, ...] = ()
    decoder: tuple[LayerScoring, ...] = ()
    cross: tuple[LayerScoring, ...] = ()


def save_trace(trace: Trace, path: Path) -> Path:
    check_output(path, [".safetensors"])
    trace = trace if trace.heads else trace.with_heads()
    tensors: dict[str, Tensor | None] = {}
    for name in trace.states:
        depths = range(trace.num_layers_of(name) + 1)
        tensors |= {f"{name}.states.{depth}": trace.residual(depth, name) for depth in depths}
        tensors |= {f"{name}.{part}": tensor for part, tensor in vars(trace.inputs[name]).items()}
    scorings = {}
    for name, layers in trace.heads.items():
        for number, heads in enumerate(layers):
            tensors |= {f"{name}.{number}.{part}": tensor for part, tensor in tensors_of(heads).items()}
        hows = [heads.how for heads in layers]
        scorings[name] = tuple(LayerScoring(scale=h.scale, softcap=h.softcap, causal=h.mask.causal) for h in hows)
    described = {
        "format": FORMAT,
        "model": to_dict(trace.config),
        "scoring": to_dict(Scorings(**scorings)),
        "token_texts": trace.token_texts,
        "source_texts": trace.source_texts,
    }
    present = {name: tensor.contiguous().clone().cpu() for name, tensor in tensors.items() if tensor is not None}
    write_safetensors(path, present, {"clearhead.trace": json.dumps(described)})
    return path


def tensors_of(heads: Heads) -> dict[str, Tensor | None]:
    how = heads.how
    named = {"queries": heads.queries, "keys": heads.keys, "values": heads.values}
    return named | {"mask": how.mask.allowed, "bias": how.bias, "temperature": how.temperature}


def load_trace(path: Path, network: Transformer | None) -> Trace:
    return Reader.open(path, "cpu" if network is None else str(network.device)).trace(network)


@dataclass(frozen=True)
class Reader:
    """A file, read; every step says what of it is wrong."""

    path: Path
    config: ModelConfig
    scorings: Scorings
    texts: dict[str, list[str]]
    tensors: dict[str, Tensor]

    @staticmethod
    def open(path: Path, device: str) -> "Reader":
        if not path.is_file():
            raise ClearheadError(f"there is no file {path}")
        try:
            with safe_open(path, framework="pt", device=device) as file:
                described = parse_json((file.metadata() or {}).get("clearhead.trace", "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, ValueError) as error:
            raise ClearheadError(f"{path} is not a saved trace: {error}") from None
        if not isinstance(described, dict) or described.get("format") != FORMAT:
            raise ClearheadError(f"{path} is not a trace of format {FORMAT}; trace.save(path) writes one")
        texts = {name: described.get(name) or [] for name in ("token_texts", "source_texts")}
        for name, found in texts.items():
            if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
                raise ClearheadError(f"{path}: {name} must be a list of texts")
        config = from_dict(ModelConfig, described.get("model"), f"{path}: model")
        return Reader(path, config, from_dict(Scorings, described.get("scoring"), f"{path}: scoring"), texts, tensors)

    def trace(self, network: Transformer | None) -> Trace:
        if network is not None and network.config != self.config:
            raise ClearheadError(f"{self.path} was traced from another model than the one given")
        if network is not None:
            self.check_precision(next(network.parameters()).dtype)
        names = [name for name in ("encoder", "decoder") if getattr(self.config, name) is not None]
        inputs = {name: self.inputs(name) for name in names}
        tokens = {name: inputs[name].tokens[0].tolist() for name in names}
        across = self.config.is_encoder_decoder
        kinds = [*names, "cross"] if across else names
        made = Trace(
            config=self.config,
            tokens=tokens[names[-1]],
            token_texts=self.texts["token_texts"],
            states={name: self.states(name, len(tokens[name])) for name in names},
            source_tokens=tokens["encoder"] if across else None,
            source_texts=self.texts["source_texts"] if across else None,
            heads={kind: self.heads(kind, {name: len(tokens[name]) for name in names}) for kind in kinds},
            network=network,
            inputs=inputs,
        )
        self.need(len(made.token_texts) == len(made.tokens), "token_texts must have one text for each token")
        self.need(len(made.source_texts or ()) == len(made.source_tokens or ()), "source_texts must do the same")
        return made

    def check_precision(self, dtype: torch.dtype) -> None:
        for name, tensor in self.tensors.items():
            same = tensor.dtype == dtype or ".states." not in name
            self.need(same, f"{name} is of {tensor.dtype}; load the model in that precision, not in {dtype}")

    def inputs(self, name: str) -> Inputs:
        tokens = self.tensor(f"{name}.tokens")
        fits = tokens.ndim == 2 and tokens.shape[0] == 1 and tokens.numel() > 0 and tokens.dtype == torch.int64
        self.need(fits, f"{name}.tokens must be (1, T) of int64")
        parts: dict[str, Any] = {part.name: self.tensors.get(f"{name}.{part.name}") for part in fields(Inputs)}
        for part, tensor in parts.items():
            same = tensor is None or (tensor.shape == tokens.shape and not tensor.is_floating_point())
            self.need(same, f"{name}.{part} must be whole numbers, as many as tokens")
        return Inputs(**parts)

    def states(self, name: str, length: int) -> dict[int, Tensor]:
        depths = range(len(getattr(self.config, name).layers) + 1)
        found = {depth: self.tensor(f"{name}.states.{depth}") for depth in depths}
        fits = all(state.shape == (length, self.config.width) and state.is_floating_point() for state in found.values())
        self.need(fits, f"{name}.states have wrong shapes")
        return found

    def heads(self, kind: str, lengths: dict[str, int]) -> list[Heads]:
        stack = "decoder" if kind == "cross" else kind
        layers, scorings = getattr(self.config, stack).layers, getattr(self.scorings, kind)
        num_keys = lengths["encoder" if kind == "cross" else kind]
        self.need(len(scorings) == len(layers), f"scoring.{kind} must have {len(layers)} layers")
        found = []
        for number, (layer, scoring) in enumerate(zip(layers, scorings, strict=True)):
            attention = layer.cross_attention if kind == "cross" else layer.attention
            whole = (1, attention.num_heads, lengths[stack], num_keys)
            found.append(self.layer_heads(f"{kind}.{number}", whole, scoring))
            value_width = attention.value_width or attention.head_width
            self.need(found[-1].values.shape[3] == value_width, f"{kind}.{number}.values have a wrong shape")
        return found

    def layer_heads(self, place: str, whole: tuple[int, int, int, int], scoring: LayerScoring) -> Heads:
        """`whole`: the shape of all scores (1, N, T, S)."""
        queries, keys, values = (self.tensor(f"{place}.{part}") for part in ("queries", "keys", "values"))
        _, num_heads, num_queries, num_keys = whole
        fits = queries.ndim == keys.ndim == values.ndim == 4 and keys.shape[:3] == values.shape[:3]
        self.need(fits and queries.shape[:3] == (1, num_heads, num_queries), f"{place}.queries have a wrong shape")
        kv_heads = keys.shape[1]
        fits = keys.shape == (1, kv_heads, num_keys, queries.shape[3]) and kv_heads > 0 and num_heads % kv_heads == 0
        self.need(fits, f"{place}.keys have a wrong shape")
        fits = queries.is_floating_point() and queries.dtype == keys.dtype == values.dtype
        self.need(fits, f"{place}.queries, keys and values must be of one floating type")
        extras: dict[str, Any] = {part: self.tensors.get(f"{place}.{part}") for part in ("mask", "bias", "temperature")}
        for part, tensor in extras.items():
            self.need(tensor is None or serves(tensor, whole), f"{place}.{part} has a wrong shape")
        mask = extras.pop("mask")
        self.need(mask is None or mask.dtype == torch.bool, f"{place}.mask must be true and false")
        how = Scoring(Mask(mask, causal=scoring.causal), scoring.scale, scoring.softcap, **extras)
        return Heads(queries, keys, values, how)

    def tensor(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise ClearheadError(f"{self.path} lacks the tensor {name}")
        return self.tensors[name]

    def need(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise ClearheadError(f"{self.path}: {otherwise}")


def serves(tensor: Tensor, whole: tuple[int, ...]) -> bool:
    """One entry in each dimension, or all."""
    return tensor.ndim == len(whole) and all(a in (1, b) for a, b in zip(tensor.shape, whole, strict=True))
