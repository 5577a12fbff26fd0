"""Rotary scalings that GGUF files store as tensors: that of Llama 3, and LongRoPE's factors for short and long texts.

    config = with_rotary_scaling(config, file); tensors = rotary_tensors(config)

The tensors hold numbers by which the frequencies of the rotary pairs are divided. Of LongRoPE's, llama.cpp takes the
long ones if the memory for the context has room for more tokens than the original context; we take them if the text has
more tokens, as transformers does. Both agree if the memory is as long as the text.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clearhead.architecture import GroupedAttention, Llama3Scaling, LongRopeScaling, ModelConfig, Rope
from clearhead.checkpoint.gguf import GgufFile
from clearhead.errors import ClearheadError
from clearhead.families import LONG_FACTORS, ROTARY_DIVISORS, SHORT_FACTORS, Settings, to_plain_value
from clearhead.model import llama3_frequencies

_HIGH_FACTORS = (4.0, 1.0)  # of Llama 3 and of Llama 4 Scout


def with_rotary_scaling(config: ModelConfig, file: GgufFile) -> ModelConfig:
    """Return the config with the rotary scaling that the tensors of a file represent, if it has such tensors."""
    found = [name for name in (ROTARY_DIVISORS, LONG_FACTORS, SHORT_FACTORS) if name in file.tensors]
    if not found:
        return config
    if found not in ([ROTARY_DIVISORS], [LONG_FACTORS, SHORT_FACTORS]):
        raise ClearheadError(
            f"{file.path} has {' and '.join(found)}; a file has either {ROTARY_DIVISORS}, or both {LONG_FACTORS} and "
            f"{SHORT_FACTORS}"
        )
    if config.decoder is None:
        raise ClearheadError(f"{file.path} has {found[0]}, but its model is an encoder, which has no such scaling")
    if found == [ROTARY_DIVISORS]:
        divisors = _numbers(file, ROTARY_DIVISORS)
        return _with_scaling(config, file, lambda rope: _read_llama3(file, divisors, rope))
    scaling = _read_longrope(file, config.context)
    return _with_scaling(config, file, lambda rope: scaling)


def _numbers(file: GgufFile, name: str) -> Tensor:
    numbers = file.read(name).float()
    if numbers.ndim != 1:
        raise ClearheadError(f"{file.path}: {name} has the shape {tuple(numbers.shape)}; it must be a vector")
    return numbers


def _with_scaling(
    config: ModelConfig, file: GgufFile, scaling_of: Callable[[Rope], Llama3Scaling | LongRopeScaling]
) -> ModelConfig:
    """Return the config with this scaling of all its rotary positions, of which there must be some."""
    assert config.decoder is not None
    layers, num_scaled = [], 0
    for layer in config.decoder.layers:
        attention = layer.attention
        if isinstance(attention, GroupedAttention) and isinstance(attention.position, Rope):
            num_scaled += 1
            position = replace(attention.position, scaling=scaling_of(attention.position))
            layer = replace(layer, attention=replace(attention, position=position))
        layers.append(layer)
    if not num_scaled:
        raise ClearheadError(f"{file.path} has factors of rotary positions, but its model has no such positions")
    return replace(config, decoder=replace(config.decoder, layers=tuple(layers)))


def _read_llama3(file: GgufFile, divisors: Tensor, rope: Rope) -> Llama3Scaling:
    scaling = llama3_scaling(divisors, rope.theta)
    if scaling is None:
        raise ClearheadError(f"{file.path}: {ROTARY_DIVISORS} holds a rotary scaling that is not Llama 3's")
    return scaling


def _read_longrope(file: GgufFile, context: int) -> LongRopeScaling:
    prefix = f"{file.metadata['general.architecture']}.rope.scaling."
    stored = {key: to_plain_value(value) for key, value in file.metadata.items() if key.startswith(prefix)}
    keys = Settings(stored, str(file.path))
    return LongRopeScaling(
        short_factors=tuple(to_plain_value(_numbers(file, SHORT_FACTORS))),
        long_factors=tuple(to_plain_value(_numbers(file, LONG_FACTORS))),
        original_context=keys.integer(prefix + "original_context_length", context),
        attention_factor=keys.number(prefix + "attn_factor", 1.0),
    )


def rotary_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors that represent a config's rotary scaling; none if metadata or nothing represents it."""
    ropes = {
        (layer.attention.position, layer.attention.head_width)
        for layer in (config.decoder.layers if config.decoder is not None else ())
        if isinstance(layer.attention, GroupedAttention) and isinstance(layer.attention.position, Rope)
    }
    scalings: set[Any] = {rope.scaling for rope, _ in ropes}
    if not any(isinstance(scaling, Llama3Scaling | LongRopeScaling) for scaling in scalings):
        return {}
    if len(ropes) > 1:
        raise ClearheadError("a GGUF file cannot express layers whose rotary positions are scaled in different ways")
    ((rope, head_width),) = ropes
    if isinstance(rope.scaling, LongRopeScaling):
        factors = {LONG_FACTORS: rope.scaling.long_factors, SHORT_FACTORS: rope.scaling.short_factors}
        return {name: torch.tensor(numbers, dtype=torch.float32) for name, numbers in factors.items()}
    assert isinstance(rope.scaling, Llama3Scaling)
    divisors = _llama3_divisors(rope.theta, head_width, rope.scaling)
    if llama3_scaling(divisors, rope.theta) != rope.scaling:
        raise ClearheadError(f"a GGUF file cannot express the rotary scaling {rope.scaling}")
    return {ROTARY_DIVISORS: divisors}


def llama3_scaling(divisors: Tensor, theta: float) -> Llama3Scaling | None:
    """Return the scaling that a tensor of frequency divisors represents, or None if it is not Llama 3's."""
    for high in _HIGH_FACTORS:
        scaling = Llama3Scaling(
            factor=float(divisors.max()), low_frequency_factor=1.0, high_frequency_factor=high, original_context=8192
        )
        expected = _llama3_divisors(theta, 2 * len(divisors), scaling)
        if ((expected - divisors).abs() <= 1e-3 * divisors).all():
            return scaling
    return None


def _llama3_divisors(theta: float, head_width: int, scaling: Llama3Scaling) -> Tensor:
    """Return the numbers by which Llama 3's scaling divides the frequencies of the rotary pairs, (head_width / 2,)."""
    exponents = torch.arange(0, head_width, 2, dtype=torch.float32) / head_width
    frequencies = 1 / theta**exponents
    return frequencies / llama3_frequencies(frequencies, scaling)
