"""Block formats of GGUF tensors whose quants are entries of a table: IQ1 to IQ4, and 4-bit floating-point numbers.

    quants, scales, offsets = split_iq4_nl(blocks)      # (num_blocks, 18) uint8 -> 32 of 16 uneven levels

In the IQ1, IQ2 and IQ3 formats an index selects 4 or 8 values at once, and further bits hold their signs. These tables
have no formula: they are read from the gguf package, which is an optional dependency. The drawings are as in
gguf_blocks.py; s are integer scales of a group, i are indexes of a table.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from clearhead.checkpoint.gguf_fields import BlockParts, Bytes, LevelParts, bit_planes, halves, one_group
from clearhead.errors import ClearheadError

# The 16 levels of IQ4_NL and IQ4_XS are denser around zero, where most weights are.
_UNEVEN_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)
# E2M1: sign, two bits of exponent, one bit of fraction; twice the value, so that all are integers.
_FLOAT4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)
# The sign of the eighth value is set if that of an odd number of the other seven is.
_SEVEN_SIGNS = np.array([bits | bits.bit_count() % 2 << 7 for bits in range(128)], dtype=np.uint8)


@cache
def _table(name: str) -> NDArray[np.int8]:
    """Return the values (entries, 4 or 8) of a format's table; those of IQ1 are multiplied by 8."""
    try:
        from gguf import quants
    except ImportError:
        raise ClearheadError(
            f"{name} tensors need the tables in the gguf package: install it (pip install gguf), "
            "or use a file with another block type"
        ) from None
    stored = getattr(quants, name)
    stored.init_grid()
    return (stored.grid[0, 0] * (8 if name == "IQ1_S" else 1)).astype(np.int8)


def _signed(values: NDArray[np.int8], signs: Bytes) -> NDArray[np.int8]:
    """Negate the values (num_blocks, ...) whose bits are set; `signs` has one bit per value, low bits first."""
    bits = bit_planes(signs.reshape(len(values), -1), 1).swapaxes(1, 2)
    return values * (1 - 2 * bits.reshape(values.shape))


def _quarter_scales(blocks: Bytes, stored: NDArray[np.integer]) -> NDArray[np.float32]:
    """Return scale * (s + 1/2) / 4 for the integer scales (num_blocks, G), as (num_blocks, G, 1)."""
    return halves(blocks, 0) * (np.float32(0.5) + stored.astype(np.float32))[..., None] * np.float32(0.25)


def _nibble_pairs(packed: Bytes) -> Bytes:
    """(num_blocks, n) bytes -> (num_blocks, 2 n): the low and the high half of each byte side by side."""
    return bit_planes(packed, 4).view(np.uint8).swapaxes(1, 2).reshape(len(packed), -1)


def split_iq2_xxs(blocks: Bytes) -> BlockParts:
    """8 groups of 32 values: scale * (s + 1/2) / 4 * value.

    0       2                                                          66
    | scale | 8 times: i[0]...i[3], 4 * 7 bits of signs, 4 bits of s   |
    """
    words = blocks[:, 2:66].view("<u4").reshape(-1, 8, 2)
    signs = _SEVEN_SIGNS[words[..., 1, None] >> np.array([0, 7, 14, 21], dtype=np.uint32) & 127]
    indexes = np.ascontiguousarray(words[..., 0]).view(np.uint8).reshape(-1, 8, 4)
    values = _table("IQ2_XXS")[indexes].reshape(-1, 8, 32)
    return BlockParts(_signed(values, signs), _quarter_scales(blocks, words[..., 1] >> 28), None)


def split_iq2_xs(blocks: Bytes) -> BlockParts:
    """16 groups of 16 values: scale * (s + 1/2) / 4 * value.

    0       2                                       66                 74
    | scale | 32 times: 9 bits i, 7 bits of signs   | s[2j], s[2j+1]   |
    """
    words = blocks[:, 2:66].view("<u2")
    values = _table("IQ2_XS")[words & 511].reshape(-1, 16, 16)
    scales = _quarter_scales(blocks, _nibble_pairs(blocks[:, 66:74]))
    return BlockParts(_signed(values, _SEVEN_SIGNS[words >> 9]), scales, None)


def split_iq2_s(blocks: Bytes) -> BlockParts:
    """16 groups of 16 values: scale * (s + 1/2) / 4 * value.

    0       2                34      66                       74               82
    | scale | low 8 of i[j]  | signs | high 2 of i[4j]...     | s[2j], s[2j+1] |
    """
    high = bit_planes(blocks[:, 66:74], 2).view(np.uint8).swapaxes(1, 2).reshape(-1, 32).astype(np.uint16)
    values = _table("IQ2_S")[blocks[:, 2:34] | high << 8].reshape(-1, 16, 16)
    scales = _quarter_scales(blocks, _nibble_pairs(blocks[:, 74:82]))
    return BlockParts(_signed(values, blocks[:, 34:66]), scales, None)


def split_iq3_xxs(blocks: Bytes) -> BlockParts:
    """8 groups of 32 values: scale * (s + 1/2) / 2 * value.

    0       2       66                                       98
    | scale | i[j]  | 8 times: 4 * 7 bits of signs, 4 of s   |
    """
    words = blocks[:, 66:98].view("<u4")
    signs = _SEVEN_SIGNS[words[..., None] >> np.array([0, 7, 14, 21], dtype=np.uint32) & 127]
    values = _table("IQ3_XXS")[blocks[:, 2:66]].reshape(-1, 8, 32)
    return BlockParts(_signed(values, signs), _quarter_scales(blocks, words >> 28) * np.float32(2), None)


def split_iq3_s(blocks: Bytes) -> BlockParts:
    """8 groups of 32 values: scale * (2 s + 1) * value.

    0       2               66                       74      106               110
    | scale | low 8 of i[j] | high bit of i[8j]...   | signs | s[2j], s[2j+1]  |
    """
    high = bit_planes(blocks[:, 66:74], 1).view(np.uint8).swapaxes(1, 2).reshape(-1, 64).astype(np.uint16)
    values = _table("IQ3_S")[blocks[:, 2:66] | high << 8].reshape(-1, 8, 32)
    scales = 2 * _nibble_pairs(blocks[:, 106:110]).astype(np.float32) + 1
    return BlockParts(_signed(values, blocks[:, 74:106]), halves(blocks, 0) * scales[..., None], None)


def split_iq1_s(blocks: Bytes) -> BlockParts:
    """8 groups of 32 values: scale * (2 s + 1) * (value +- 1/8).

    0       2                34                                                       50
    | scale | low 8 of i[j]  | 8 times: high 3 of i[4j]...i[4j+3], 3 bits s, sign     |
    """
    words = blocks[:, 34:50].view("<u2")
    high = words[..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16) & 7
    indexes = blocks[:, 2:34] | high.reshape(-1, 32) << 8
    shifts = 1 - 2 * (words >> 15).astype(np.int8)
    values = _table("IQ1_S")[indexes].reshape(-1, 8, 32) + shifts[..., None]
    scales = (2 * (words >> 12 & 7) + 1).astype(np.float32) * np.float32(0.125)
    return BlockParts(values, halves(blocks, 0) * scales[..., None], None)


def split_iq1_m(blocks: Bytes) -> BlockParts:
    """16 groups of 16 values, in halves of 8: scale * (2 s + 1) * (value +- 1/8).

    0                32                                       48                                              56
    | low 8 of i[j]  | high 3 of i[2j], sign, i[2j+1], sign   | 4 times: s[4j]...s[4j+3], 4 bits of the scale |
    """
    words = blocks[:, 48:56].view("<u2")
    scale_bits = words >> 12 << np.array([0, 4, 8, 12], dtype=np.uint16)
    scale = np.bitwise_or.reduce(scale_bits, axis=1).astype(np.uint16).view(np.float16).astype(np.float32)
    group_scales = (words[..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16) & 7).reshape(-1, 16)
    nibbles = _nibble_pairs(blocks[:, 32:48])
    shifts = 1 - 2 * (nibbles >> 3).astype(np.int8)
    values = _table("IQ1_S")[blocks[:, :32] | (nibbles & 7).astype(np.uint16) << 8] + shifts[..., None]
    scales = (2 * group_scales + 1).astype(np.float32) * np.float32(0.125)
    return BlockParts(values.reshape(-1, 16, 16), scale[:, None, None] * scales[..., None], None)


def split_iq4_nl(blocks: Bytes) -> BlockParts:
    """32 values of 16 uneven levels: scale * level.

    0       2                18
    | scale | i[j], i[j+16]  |
    """
    return BlockParts(_UNEVEN_LEVELS[one_group(bit_planes(blocks[:, 2:18], 4))], halves(blocks, 0), None)


def split_iq4_xs(blocks: Bytes) -> LevelParts:
    """8 groups of 32 values of 16 uneven levels: scale * (s - 32) * level.

    0       2                       4                          8                             136
    | scale | high 2 of s[0]...s[7] | low 4 of s[2j], s[2j+1]  | i[n], i[n+16]: 8 times 16   |
    """
    high = blocks[:, 2:4].view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    group_scales = (_nibble_pairs(blocks[:, 4:8]) | high.astype(np.uint8) << 4).astype(np.int8) - 32
    levels = _UNEVEN_LEVELS[bit_planes(blocks[:, 8:136].reshape(-1, 8, 16), 4)]
    return LevelParts(levels.reshape(-1, 8, 32), halves(blocks, 0), group_scales)


def split_mxfp4(blocks: Bytes) -> BlockParts:
    """32 values in E2M1: 2^(exponent - 127) * value. Source: OCP Microscaling Formats 1.0.

    0          1                17
    | exponent | i[j], i[j+16]  |
    """
    # Half the power of two, because the levels are doubled; the smallest two are subnormal numbers.
    exponent = blocks[:, :1].astype(np.uint32)
    bits = np.where(exponent < 2, np.uint32(1 << 21) << exponent, exponent - 1 << 23).astype(np.uint32)
    return BlockParts(_FLOAT4_LEVELS[one_group(bit_planes(blocks[:, 1:17], 4))], bits.view(np.float32)[..., None], None)


def split_nvfp4(blocks: Bytes) -> BlockParts:
    """4 groups of 16 values in E2M1, each with a scale in unsigned E4M3: scale * value.

    0            4                            36
    | scale[j]   | i[n], i[n+8]: 4 times 8    |
    """
    stored = blocks[:, :4]
    exponent, fraction = (stored >> 3 & 15).astype(np.int32), (stored & 7).astype(np.float32)
    scales = np.where(exponent == 0, np.ldexp(fraction, -9), np.ldexp(1 + fraction / 8, exponent - 7))
    scales = np.where(stored == 0x7F, np.float32(0), scales * np.float32(0.5)).astype(np.float32)  # 0x7F is NaN
    levels = _FLOAT4_LEVELS[bit_planes(blocks[:, 4:36].reshape(-1, 4, 8), 4)]
    return BlockParts(levels.reshape(-1, 4, 16), scales[..., None], None)
