"""Dequantize the block formats of GGUF tensors: bytes to quants, scales and offsets, and these to float32.

    values = dequantize(blocks, BLOCK_TYPES[3])   # Q4_1: (num_blocks, 20) uint8 -> (num_blocks, 32) float32

A row of a quantized matrix consists of blocks, and a block of G groups. All values of a group share one scale and one
offset:

    value = scale * quant + offset        (the offset is 0 if the format has none)

The formats differ only in how they store these three. The docstring of each function draws its layout: byte numbers
above, and in each field the content of its byte j, low bits first. `scale` and `minimum` are float16, and q are the
quants. A Q*_K block has an integer scale s (and minimum m) for each group, which multiplies the float16 of the block.
gguf_codebooks.py has the formats whose quants are entries of a table.
Source of the layouts: the block_q* structs in ggml-common.h of https://github.com/ggml-org/ggml.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.checkpoint import gguf_codebooks as codebooks
from clearhead.checkpoint.gguf_fields import BlockParts, Bytes, LevelParts, bit_planes, halves, one_group

VALUES_PER_CHUNK = 2**18
"""Values that `dequantize` processes at a time, so that its temporary arrays stay in the processor's cache."""


@dataclass(frozen=True, kw_only=True)
class BlockType:
    """A storage format: plain numbers (`layout` is their dtype) or blocks (`layout` splits them into parts)."""

    name: str
    values_per_block: int
    bytes_per_block: int
    layout: torch.dtype | Callable[[Bytes], BlockParts | LevelParts]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that `dequantize` returns."""
        return self.layout if isinstance(self.layout, torch.dtype) else torch.float32

    def split(self, blocks: Bytes) -> BlockParts:
        """Return the parts of blocks, with one scale and one offset for each group."""
        assert not isinstance(self.layout, torch.dtype), "plain numbers have no parts"
        parts = self.layout(blocks)
        return parts.multiplied() if isinstance(parts, LevelParts) else parts


def dequantize(blocks: Bytes, block_type: BlockType) -> Tensor:
    """(num_blocks, bytes_per_block) -> (num_blocks, values_per_block) in float32; plain numbers keep their dtype.

    It uses NumPy because PyTorch's threads would wait for each other after each of these small operations, which on
    busy cores took most of the time.
    """
    assert blocks.shape[1:] == (block_type.bytes_per_block,)
    if isinstance(block_type.layout, torch.dtype):
        return torch.from_numpy(blocks).view(block_type.layout)
    values = np.empty((len(blocks), block_type.values_per_block), dtype=np.float32)
    num_blocks = VALUES_PER_CHUNK // block_type.values_per_block
    with np.errstate(all="ignore"):  # a damaged file may contain any scale; loaders check the values
        for start in range(0, len(blocks), num_blocks):
            quants, scales, offsets = block_type.split(blocks[start : start + num_blocks])
            groups = values[start : start + num_blocks].reshape(quants.shape)
            np.multiply(quants, scales, out=groups)
            if offsets is not None:
                groups += offsets
    return torch.from_numpy(values)


def _split_q4_0(blocks: Bytes) -> BlockParts:
    """32 values of 4 bits around zero: scale * (q - 8).

    0       2                18
    | scale | q[j], q[j+16]  |
    """
    return BlockParts(one_group(bit_planes(blocks[:, 2:18], 4)) - 8, halves(blocks, 0), None)


def _split_q4_1(blocks: Bytes) -> BlockParts:
    """32 values of 4 bits above a minimum: scale * q + minimum.

    0       2         4                20
    | scale | minimum | q[j], q[j+16]  |
    """
    return BlockParts(one_group(bit_planes(blocks[:, 4:20], 4)), halves(blocks, 0), halves(blocks, 2))


def _split_q5_0(blocks: Bytes) -> BlockParts:
    """32 values of 5 bits around zero: scale * (q - 16).

    0       2                             6                        22
    | scale | high bit of q[8j]...q[8j+7] | low 4 of q[j], q[j+16] |
    """
    quants = one_group(bit_planes(blocks[:, 6:22], 4)) | _fifth_bits(blocks[:, 2:6])
    return BlockParts(quants - 16, halves(blocks, 0), None)


def _split_q5_1(blocks: Bytes) -> BlockParts:
    """32 values of 5 bits above a minimum: scale * q + minimum.

    0       2         4                             8                        24
    | scale | minimum | high bit of q[8j]...q[8j+7] | low 4 of q[j], q[j+16] |
    """
    quants = one_group(bit_planes(blocks[:, 8:24], 4)) | _fifth_bits(blocks[:, 4:8])
    return BlockParts(quants, halves(blocks, 0), halves(blocks, 2))


def _split_q8_0(blocks: Bytes) -> BlockParts:
    """32 signed bytes: scale * q.

    0       2       34
    | scale | q[j]  |
    """
    return BlockParts(one_group(blocks[:, 2:34].view(np.int8)), halves(blocks, 0), None)


def _split_q2_k(blocks: Bytes) -> LevelParts:
    """16 groups of 16 values of 2 bits: scale * s * q - minimum * m.

    0            16                                 80      82        84
    | s[j], m[j] | q[n], q[n+32], q[n+64], q[n+96]  | scale | minimum |     n: 0-31, then 128-159
    """
    group_scales, group_minimums = bit_planes(blocks[:, :16], 4).swapaxes(0, 1)
    quants = _two_bit_quants(blocks[:, 16:80]).reshape(-1, 16, 16)
    return LevelParts(quants, halves(blocks, 80), group_scales, -halves(blocks, 82), group_minimums)


def _split_q3_k(blocks: Bytes) -> LevelParts:
    """16 groups of 16 values of 3 bits around zero: scale * (s - 32) * (q - 4).

    0                                       32                   96                     108     110
    | high bit of q[j], q[j+32]...q[j+224]  | low 2 as in Q2_K   | s: 6 bits, see below | scale |

    96                      104                                         108
    | low 4 of s[j], s[j+8] | high 2 of s[j], s[j+4], s[j+8], s[j+12]   |
    """
    low_bits = bit_planes(blocks[:, 96:104], 4).reshape(-1, 16)
    high_bits = bit_planes(blocks[:, 104:108], 2).reshape(-1, 16)
    group_scales = (low_bits | (high_bits << 4)) - 32
    quants = _two_bit_quants(blocks[:, 32:96]) | (bit_planes(blocks[:, :32], 1).reshape(-1, 256) << 2)
    return LevelParts(quants.reshape(-1, 16, 16) - 4, halves(blocks, 108), group_scales)


def _split_q4_k(blocks: Bytes) -> LevelParts:
    """8 groups of 32 values of 4 bits: scale * s * q - minimum * m.

    0       2         4                         16               144
    | scale | minimum | s, m: `_six_bit_pairs`  | q[n], q[n+32]  |     n: 0-31, 64-95, 128-159, 192-223
    """
    group_scales, group_minimums = _six_bit_pairs(blocks[:, 4:16])
    quants = bit_planes(blocks[:, 16:144].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    return LevelParts(quants, halves(blocks, 0), group_scales, -halves(blocks, 2), group_minimums)


def _split_q5_k(blocks: Bytes) -> LevelParts:
    """8 groups of 32 values of 5 bits: scale * s * q - minimum * m.

    0                  16                                     48                     176
    | first as in Q4_K | high bit of q[j], q[j+32]...q[j+224] | low 4 as q in Q4_K   |
    """
    group_scales, group_minimums = _six_bit_pairs(blocks[:, 4:16])
    low_bits = bit_planes(blocks[:, 48:176].reshape(-1, 4, 32), 4)
    quants = low_bits.reshape(-1, 8, 32) | (bit_planes(blocks[:, 16:48], 1) << 4)
    return LevelParts(quants, halves(blocks, 0), group_scales, -halves(blocks, 2), group_minimums)


def _split_q6_k(blocks: Bytes) -> LevelParts:
    """16 groups of 16 values of 6 bits around zero: scale * s * (q - 32).

    0                        128                      192           208     210
    | low 4 of q[n], q[n+64] | high 2 as q in Q2_K    | s[j]: int8  | scale |     n: 0-63, then 128-191
    """
    low_bits = bit_planes(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 256)
    quants = low_bits | (_two_bit_quants(blocks[:, 128:192]) << 4)
    group_scales = blocks[:, 192:208].view(np.int8)
    return LevelParts(quants.reshape(-1, 16, 16) - 32, halves(blocks, 208), group_scales)


def _split_q1_0(blocks: Bytes) -> BlockParts:
    """128 values of 1 bit: scale if it is set, otherwise -scale.

    0       2                   18
    | scale | q[8j]...q[8j+7]   |
    """
    return BlockParts(2 * one_group(bit_planes(blocks[:, 2:18], 1).swapaxes(1, 2)) - 1, halves(blocks, 0), None)


def _split_tq1_0(blocks: Bytes) -> BlockParts:
    """256 values of -1, 0 or 1: scale * (t - 1). A byte holds t of five values as digits of base 3 (the last: four).

    0                           32                               48                               52      54
    | t[j], t[j+32]...t[j+128]  | t[160+j], t[176+j]...t[224+j]  | t[240+j], t[244+j]...t[252+j]  | scale |

    A byte is 256/243 times the number, rounded up. Multiplying it by a power of 3, modulo 256, moves a digit to the
    front: the digit is then 3/256 of the byte, rounded down.
    """
    powers = np.array([1, 3, 9, 27, 81], dtype=np.uint8)[:, None]
    parts = (blocks[:, None, :32] * powers, blocks[:, None, 32:48] * powers, blocks[:, None, 48:52] * powers[:4])
    digits = np.concatenate([part.reshape(len(blocks), -1) for part in parts], axis=1).astype(np.uint16) * 3 >> 8
    return BlockParts(one_group(digits.astype(np.int8)) - 1, halves(blocks, 52), None)


def _split_tq2_0(blocks: Bytes) -> BlockParts:
    """256 values of 2 bits: scale * (q - 1).

    0                                 64      66
    | as q in Q2_K                    | scale |
    """
    return BlockParts(one_group(_two_bit_quants(blocks[:, :64])) - 1, halves(blocks, 64), None)


def _fifth_bits(packed: Bytes) -> NDArray[np.int8]:
    """(num_blocks, 4) bytes, a little-endian word with one bit per value -> (num_blocks, 1, 32) of 0 or 16."""
    return one_group(bit_planes(packed, 1).swapaxes(1, 2)) << 4


def _two_bit_quants(packed: Bytes) -> NDArray[np.int8]:
    """(num_blocks, 64) bytes -> (num_blocks, 256), in the layout of Q2_K."""
    return bit_planes(packed.reshape(-1, 2, 32), 2).reshape(-1, 256)


def _six_bit_pairs(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Twelve bytes of Q4_K or Q5_K -> eight group scales s and eight group minimums m of 6 bits each.

    0                     4                     8                            12
    | s[j], high 2 s[j+4] | m[j], high 2 m[j+4] | low 4 of s[j+4], of m[j+4] |
    """
    scales, minimums, nibbles = packed.reshape(-1, 3, 4).swapaxes(0, 1)
    low_scales, low_minimums = bit_planes(nibbles, 4).view(np.uint8).swapaxes(0, 1)
    return (
        np.concatenate([scales & 63, (scales >> 6 << 4) | low_scales], axis=1),
        np.concatenate([minimums & 63, (minimums >> 6 << 4) | low_minimums], axis=1),
    )


BLOCK_TYPES = {
    type_id: BlockType(name=name, values_per_block=values, bytes_per_block=num_bytes, layout=layout)
    for type_id, name, values, num_bytes, layout in (
        (0, "F32", 1, 4, torch.float32),
        (1, "F16", 1, 2, torch.float16),
        (2, "Q4_0", 32, 18, _split_q4_0),
        (3, "Q4_1", 32, 20, _split_q4_1),
        (6, "Q5_0", 32, 22, _split_q5_0),
        (7, "Q5_1", 32, 24, _split_q5_1),
        (8, "Q8_0", 32, 34, _split_q8_0),
        (10, "Q2_K", 256, 84, _split_q2_k),
        (11, "Q3_K", 256, 110, _split_q3_k),
        (12, "Q4_K", 256, 144, _split_q4_k),
        (13, "Q5_K", 256, 176, _split_q5_k),
        (14, "Q6_K", 256, 210, _split_q6_k),
        (16, "IQ2_XXS", 256, 66, codebooks.split_iq2_xxs),
        (17, "IQ2_XS", 256, 74, codebooks.split_iq2_xs),
        (18, "IQ3_XXS", 256, 98, codebooks.split_iq3_xxs),
        (19, "IQ1_S", 256, 50, codebooks.split_iq1_s),
        (20, "IQ4_NL", 32, 18, codebooks.split_iq4_nl),
        (21, "IQ3_S", 256, 110, codebooks.split_iq3_s),
        (22, "IQ2_S", 256, 82, codebooks.split_iq2_s),
        (23, "IQ4_XS", 256, 136, codebooks.split_iq4_xs),
        (29, "IQ1_M", 256, 56, codebooks.split_iq1_m),
        (30, "BF16", 1, 2, torch.bfloat16),
        (34, "TQ1_0", 256, 54, _split_tq1_0),
        (35, "TQ2_0", 256, 66, _split_tq2_0),
        (39, "MXFP4", 32, 17, codebooks.split_mxfp4),
        (40, "NVFP4", 64, 36, codebooks.split_nvfp4),
        (41, "Q1_0", 128, 18, _split_q1_0),
    )
}
"""By GGML type id, the number that a GGUF file stores for each tensor."""
