"""Which matrices of a network keep 8 bits when the others are packed in 4.

    pack_parameter(config, "decoder.layers.0.feed_forward.down.weight", weight, "int4")      # a PackedWeight of 8 bits

Rounding to 16 levels changes some matrices more than a small model bears: the token table and the logit head, whose
errors reach every token, and the value and down projections, whose errors go into the residual stream. GGUF's Q4_K_M
also gives these more bits. The rule:

    token tables, logit head         8 bits
    value and down projections       8 bits in all layers of a network narrower than 2,048, in about half of the layers
                                     of a wider one: the first and last eighth, and every third between them
    any of these                     4 bits if 4 bits reproduce it, because it comes from a file with such blocks
    values, on a GPU                 4 bits: the kernels there read queries, keys and values as one matrix
"""

import re

import torch
from torch import Tensor

from clearhead.architecture import ModelConfig
from clearhead.backends.packed import Bits, PackedWeight, pack

_TABLES = re.compile(r"(encoder|decoder)\.embedding\.tokens\.weight|head\.weight")
_VALUES = r"(?:cross_)?attention\.value\.weight"
_PROJECTIONS = re.compile(
    r"(?P<stack>encoder|decoder)\.layers\.(?P<layer>\d+)\."
    rf"(?:(?P<value>{_VALUES})|feed_forward\.(?:shared\.)?down(?:\.weight)?)"
)
_WIDE = 2048
_SAMPLED_ROWS = 64
_REPRODUCED = 0.005  # relative error: below it is the rounding to bfloat16 (0.1 %), above it that to 16 levels (8 %)


def pack_parameter(
    config: ModelConfig, name: str, weight: Tensor, bits: Bits, dtype: torch.dtype | None = None
) -> PackedWeight:
    """Quantize a parameter of a network to `bits`, or to 8 bits if it is sensitive; `dtype` as in `pack`."""
    return pack(weight, choose_bits(config, name, weight, bits, dtype), dtype)


def choose_bits(config: ModelConfig, name: str, weight: Tensor, bits: Bits, dtype: torch.dtype | None = None) -> Bits:
    """Return the format of a parameter in a network that is packed in `bits`."""
    if bits == "int4" and is_sensitive(config, name, weight.device.type) and not _fits_four_bits(weight, dtype):
        return "int8"
    return bits


def is_sensitive(config: ModelConfig, name: str, device_type: str = "cpu") -> bool:
    """Return whether the parameter of this name keeps 8 bits on such a device."""
    if _TABLES.fullmatch(name):
        return True
    match = _PROJECTIONS.fullmatch(name)
    if match is None or (match["value"] and device_type != "cpu"):
        return False
    stack = config.encoder if match["stack"] == "encoder" else config.decoder
    assert stack is not None
    return config.width < _WIDE or gets_more_bits(int(match["layer"]), len(stack.layers))


def gets_more_bits(layer: int, num_layers: int) -> bool:
    """Return whether a layer is in the first or last eighth, or every third of the others."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _fits_four_bits(weight: Tensor, dtype: torch.dtype | None) -> bool:
    """Return whether 4 bits reproduce a matrix, judged by rows that are spread over it."""
    rows = weight.flatten(0, -2)
    sample = rows[:: max(1, len(rows) // _SAMPLED_ROWS)].to(dtype=dtype)
    error = pack(sample, "int4").unpack() - sample.float()
    return bool(error.norm() <= _REPRODUCED * sample.float().norm())
