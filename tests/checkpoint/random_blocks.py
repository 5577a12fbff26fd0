"""Random blocks of every GGUF type, and model files that consist of them: our writer quantizes to some types only.

blocks = weight_blocks("Q2_K", 19, 512)      # (19 · 512 / 256, 84) uint8, values of about 0.05
"""

from itertools import count
from unittest import mock

import numpy as np
import torch

from clearhead.checkpoint import gguf_save
from clearhead.checkpoint.gguf_blocks import BLOCK_TYPES, dequantize

BY_NAME = {block_type.name: block_type for block_type in BLOCK_TYPES.values()}
# The bytes at which the float16 numbers of a block begin.
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q1_0": [0]}
HALVES |= {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
HALVES |= {name: [0] for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ4_NL", "IQ4_XS")}
HALVES |= {"IQ1_M": [54], "TQ1_0": [52], "TQ2_0": [64], "MXFP4": [-1], "NVFP4": []}
_EXPONENT = 121  # of MXFP4: factors of 2^-7


def random_blocks(name: str, num_blocks: int, seed: int = 0) -> np.ndarray:
    """Return random bytes."""
    shape = num_blocks, BY_NAME[name].bytes_per_block
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def weight_blocks(name: str, num_rows: int, num_columns: int, seed: int = 0) -> np.ndarray:
    """Return the blocks of a matrix whose quants are random bytes, and whose values are about 0.05 large."""
    kind = BY_NAME[name]
    blocks = random_blocks(name, num_rows * num_columns // kind.values_per_block, seed)
    generator = np.random.default_rng(seed + 1)
    if name == "MXFP4":
        blocks[:, 0] = generator.integers(_EXPONENT - 2, _EXPONENT + 3, len(blocks))
        return blocks

    def set_halves(numbers: np.ndarray) -> None:
        for place, byte in enumerate(HALVES[name]):
            blocks[:, byte : byte + 2] = numbers[:, place, None].astype(np.float16).view(np.uint8)

    set_halves(np.ones((len(blocks), 2)))
    scale = 0.05 / float(dequantize(blocks, kind).std())
    set_halves(scale * (1 + 0.2 * generator.standard_normal((len(blocks), 2))))
    return blocks


def save_random_blocks(path, network, most, head, sensitive, fused) -> None:
    """Save a network with matrices of these block types as a GGUF file: vectors are its own, and blocks random."""

    def quantize(matrix, block_type, importance):
        if block_type == "F32":
            return own_quantize(matrix, block_type, importance)
        return torch.from_numpy(weight_blocks(block_type, *matrix.shape, seed=next(seeds)))

    own_quantize, seeds = gguf_save.quantize, count()
    types = {"random": (most, head, sensitive, fused, 1)}
    with mock.patch.object(gguf_save, "quantize", quantize), mock.patch.dict(gguf_save._FILE_TYPES, types):
        gguf_save.save_gguf(path, network, None, file_type="random")
