"""Storage formats for weights in 8 or 4 bits. This package imports no other part of backends/.

formats         groups of 32 weights with a shared scale: quantize, store, dequantize; GGUF's blocks without a change
block_formats   weights of 5 and 6 bits, and blocks with two levels of scales
wide_formats    5 and 6 bits stored in 8, for GPU kernels
fitting         the best scale and offset of a group of values
calibrated      GPTQ: round a weight so that its products with typical inputs change least
"""

from clearhead.backends.packed.calibrated import pack_calibrated
from clearhead.backends.packed.fitting import fit_offset, fit_symmetric, inverse
from clearhead.backends.packed.formats import (
    ELEMENTS_PER_CHUNK,
    KEPT_BLOCK_TYPES,
    NATIVE_BLOCK_TYPES,
    PACKED_PARTS,
    Bits,
    PackedWeight,
    is_consistent,
    pack,
    pack_gguf_blocks,
    pack_quants,
    packed_from_tensors,
)
from clearhead.backends.packed.wide_formats import widen, widen_all

__all__ = [
    "ELEMENTS_PER_CHUNK",
    "KEPT_BLOCK_TYPES",
    "NATIVE_BLOCK_TYPES",
    "PACKED_PARTS",
    "Bits",
    "PackedWeight",
    "fit_offset",
    "fit_symmetric",
    "inverse",
    "is_consistent",
    "pack",
    "pack_calibrated",
    "pack_gguf_blocks",
    "pack_quants",
    "packed_from_tensors",
    "widen",
    "widen_all",
]
