"""Storage formats for weights in 8 or 4 bits. This package imports no other part of backends/.

formats   groups of 32 weights with a shared scale: quantize, store, dequantize; GGUF's blocks without a change
"""

from clearhead.backends.packed.formats import (
    ELEMENTS_PER_CHUNK,
    NATIVE_BLOCK_TYPES,
    Bits,
    PackedWeight,
    pack,
    pack_gguf_blocks,
)

__all__ = ["ELEMENTS_PER_CHUNK", "NATIVE_BLOCK_TYPES", "Bits", "PackedWeight", "pack", "pack_gguf_blocks"]
