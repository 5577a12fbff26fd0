"""All block formats compared bit by bit with the gguf package, and the K formats with their definition."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import gguf
import numpy as np
import pytest
import torch

from clearhead.checkpoint import gguf_blocks, gguf_codebooks
from clearhead.checkpoint.gguf_blocks import BLOCK_TYPES, BlockType, dequantize
from clearhead.errors import ClearheadError
from tests.checkpoint.random_blocks import HALVES, random_blocks

TYPE_IDS = {block_type.name: type_id for type_id, block_type in BLOCK_TYPES.items()}
QUANTISED = [name for name in TYPE_IDS if not isinstance(BLOCK_TYPES[TYPE_IDS[name]].layout, torch.dtype)]


def block_type(name: str) -> BlockType:
    return BLOCK_TYPES[TYPE_IDS[name]]


def finite_blocks(name: str, num_blocks: int, seed: int = 0) -> np.ndarray:
    """Random bytes whose float16 fields have their top exponent bit cleared."""
    blocks = random_blocks(name, num_blocks, seed)
    blocks[:, [byte + 1 for byte in HALVES[name]]] &= 0b10111111
    return blocks


def ours(name: str, blocks: np.ndarray) -> np.ndarray:
    return dequantize(blocks, block_type(name)).float().numpy()


def theirs(name: str, blocks: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        if name == "Q1_0":  # the gguf package does not dequantize it
            signs = 2.0 * np.unpackbits(blocks[:, 2:], axis=1, bitorder="little") - 1
            return blocks[:, :2].view(np.float16).astype(np.float32) * signs.astype(np.float32)
        return np.ascontiguousarray(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]), dtype=np.float32)


def test_names_and_sizes_equal_those_of_the_gguf_package() -> None:
    for type_id, each in BLOCK_TYPES.items():
        kind = gguf.GGMLQuantizationType(type_id)
        assert (each.name, (each.values_per_block, each.bytes_per_block)) == (kind.name, gguf.GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize("name", QUANTISED)
def test_finite_random_blocks_are_bit_equal(name: str) -> None:
    blocks = finite_blocks(name, 500)
    expected = theirs(name, blocks)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(ours(name, blocks).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", TYPE_IDS)
def test_arbitrary_bytes_are_bit_equal_except_for_nan_payloads(name: str) -> None:
    blocks = random_blocks(name, 2000)
    actual, expected = ours(name, blocks), theirs(name, blocks)
    assert np.isnan(expected).any() or name in ("MXFP4", "NVFP4")
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(actual[numbers].view(np.uint32), expected[numbers].view(np.uint32))


# Half a step for weights in [-1, 1]; a whole step if 2**n steps around zero exclude one end (Q4_0, Q5_0).
@pytest.mark.parametrize(
    ("name", "largest_error"),
    [
        ("F32", 0),
        ("F16", 2**-12),
        ("BF16", 2**-9),
        ("Q8_0", 1 / 127 / 2),
        ("Q5_1", 2 / 31 / 2),
        ("Q5_0", 1 / 16),
        ("Q4_1", 2 / 15 / 2),
        ("Q4_0", 1 / 8),
    ],
)
def test_the_error_of_weights_quantized_by_the_gguf_package(name: str, largest_error: float) -> None:
    weights = np.random.default_rng(1).uniform(-1, 1, (64, 512)).astype(np.float32)
    stored = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name])
    blocks = stored.view(np.uint8).reshape(-1, block_type(name).bytes_per_block)
    actual = ours(name, blocks).reshape(weights.shape)
    np.testing.assert_array_equal(actual.view(np.uint32), theirs(name, stored).view(np.uint32))
    rounded_scale = 2**-11 if name in QUANTISED else 0  # the scale is a float16
    assert 0.8 * largest_error <= np.abs(actual - weights).max() <= largest_error + rounded_scale


@pytest.mark.parametrize("name", QUANTISED)
def test_values_are_quants_times_scales_plus_offsets(name: str) -> None:
    kind, blocks = block_type(name), finite_blocks(name, 20)
    assert not isinstance(kind.layout, torch.dtype)
    quants, scales, offsets = kind.split(blocks)
    assert quants.dtype == np.int8
    assert quants.shape[:2] == (20, scales.shape[1])
    values = quants * scales if offsets is None else quants * scales + offsets
    np.testing.assert_array_equal(values.reshape(20, -1), theirs(name, blocks))


def test_formats_with_tables_need_the_gguf_package(monkeypatch: pytest.MonkeyPatch) -> None:
    gguf_codebooks._table.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    for name in QUANTISED:
        if name.startswith(("IQ1", "IQ2", "IQ3")):
            with pytest.raises(ClearheadError, match="install it"):
                ours(name, finite_blocks(name, 1))
        else:
            ours(name, finite_blocks(name, 1))


@pytest.mark.parametrize("num_values", [256, 1024])
def test_the_chunk_size_does_not_change_the_values(num_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = finite_blocks("Q4_K", 7)
    whole = ours("Q4_K", blocks)
    monkeypatch.setattr(gguf_blocks, "VALUES_PER_CHUNK", num_values)
    np.testing.assert_array_equal(ours("Q4_K", blocks), whole)


Field = list[tuple[int, int, int]]
"""Positions of the bits of one small integer, lowest first: (byte of the block, lowest bit, number of bits)."""


@dataclass(frozen=True, kw_only=True)
class KFormat:
    """A K format as the structs and scalar loops of ggml define it, one value at a time."""

    num_groups: int
    quant: Callable[[int], Field]
    group_scale: Callable[[int], Field]
    scale_byte: int
    group_minimum: Callable[[int], Field] | None = None
    minimum_byte: int | None = None
    quant_zero: int = 0
    scale_zero: int = 0  # 128: the scale is an int8 in two's complement


def two_bits(start: int) -> Callable[[int], Field]:
    return lambda i: [(start + 32 * (i // 128) + i % 32, 2 * (i % 128 // 32), 2)]


def nibbles(start: int) -> Callable[[int], Field]:
    return lambda i: [(start + 32 * (i // 64) + i % 32, 4 * (i % 64 // 32), 4)]


def pair_scale(g: int) -> Field:
    return [(4 + g, 0, 6)] if g < 4 else [(8 + g, 0, 4), (g, 6, 2)]


def pair_minimum(g: int) -> Field:
    return [(8 + g, 0, 6)] if g < 4 else [(8 + g, 4, 4), (4 + g, 6, 2)]


K_FORMATS = {
    "Q2_K": KFormat(
        num_groups=16,
        quant=two_bits(16),
        group_scale=lambda g: [(g, 0, 4)],
        group_minimum=lambda g: [(g, 4, 4)],
        scale_byte=80,
        minimum_byte=82,
    ),
    "Q3_K": KFormat(
        num_groups=16,
        quant=lambda i: [*two_bits(32)(i), (i % 32, i // 32, 1)],
        group_scale=lambda g: [(96 + g % 8, 4 * (g // 8), 4), (104 + g % 4, 2 * (g // 4), 2)],
        scale_byte=108,
        quant_zero=4,
        scale_zero=32,
    ),
    "Q4_K": KFormat(
        num_groups=8,
        quant=nibbles(16),
        group_scale=pair_scale,
        group_minimum=pair_minimum,
        scale_byte=0,
        minimum_byte=2,
    ),
    "Q5_K": KFormat(
        num_groups=8,
        quant=lambda i: [*nibbles(48)(i), (16 + i % 32, i // 32, 1)],
        group_scale=pair_scale,
        group_minimum=pair_minimum,
        scale_byte=0,
        minimum_byte=2,
    ),
    "Q6_K": KFormat(
        num_groups=16,
        quant=lambda i: [(64 * (i // 128) + i % 64, 4 * (i % 128 // 64), 4), *two_bits(128)(i)],
        group_scale=lambda g: [(192 + g, 0, 8)],
        scale_byte=208,
        quant_zero=32,
        scale_zero=128,
    ),
}


def get_bits(block: bytes | bytearray, field: Field) -> int:
    value = shift = 0
    for byte, bit, width in field:
        value |= ((block[byte] >> bit) & (2**width - 1)) << shift
        shift += width
    return value


def set_bits(block: bytearray, field: Field, value: int) -> None:
    for byte, bit, width in field:
        block[byte] |= (value & (2**width - 1)) << bit
        value >>= width
    assert value == 0


def num_bits(field: Field) -> int:
    return sum(width for _, _, width in field)


def half(block: bytes | bytearray, byte: int) -> np.float32:
    return np.frombuffer(block, dtype="<f2", count=1, offset=byte).astype(np.float32)[0]


def stored_scale(k_format: KFormat, value: int) -> int:
    return value % 256 if k_format.scale_zero == 128 else value + k_format.scale_zero


def group_scale(k_format: KFormat, block: bytes | bytearray, group: int) -> int:
    stored = get_bits(block, k_format.group_scale(group))
    if k_format.scale_zero == 128:
        return stored - 256 if stored >= 128 else stored
    return stored - k_format.scale_zero


def scalar_dequantize(k_format: KFormat, block: bytes) -> list[np.float32]:
    values = []
    for i in range(256):
        group = i * k_format.num_groups // 256
        quant = get_bits(block, k_format.quant(i)) - k_format.quant_zero
        scale = half(block, k_format.scale_byte) * np.float32(group_scale(k_format, block, group))
        value = scale * np.float32(quant)
        if k_format.group_minimum and k_format.minimum_byte is not None:
            minimum = np.float32(get_bits(block, k_format.group_minimum(group)))
            value = value - half(block, k_format.minimum_byte) * minimum
        values.append(value)
    return values


def half_at_least(value: float) -> np.float16:
    rounded = np.float16(max(value, 1e-4))
    return rounded if rounded >= value else np.nextafter(rounded, np.float16(np.inf))


def put_half(block: bytearray, byte: int, value: np.float16) -> None:
    block[byte : byte + 2] = np.array(value, dtype="<f2").tobytes()


def quantize(name: str, weights: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Quantize 256 weights to a block; return it and the step between neighboring values in each group.

    The scale and minimum of each group are rounded up to values that the block can represent. They therefore cover the
    range of the group, and no weight is further than half a step from its value. If a format has signed scales, every
    second one is negative.
    """
    k_format = K_FORMATS[name]
    groups = weights.reshape(k_format.num_groups, -1).astype(np.float64)
    block = bytearray(block_type(name).bytes_per_block)
    signed = k_format.group_minimum is None
    largest_quant = 2 ** num_bits(k_format.quant(0)) - 1 - k_format.quant_zero
    largest_scale = 2 ** num_bits(k_format.group_scale(0)) - 1 - k_format.scale_zero

    minimums = np.zeros(len(groups))
    if k_format.group_minimum and k_format.minimum_byte is not None:
        wanted = np.maximum(0, -groups.min(axis=1))
        block_minimum = half_at_least(wanted.max() / largest_scale)
        put_half(block, k_format.minimum_byte, block_minimum)
        counts = np.ceil(wanted / float(block_minimum)).astype(int)
        for group, count in enumerate(counts):
            set_bits(block, k_format.group_minimum(group), int(count))
        minimums = counts * float(block_minimum)

    pattern = np.abs(groups).max(axis=1) if signed else groups.max(axis=1) + minimums
    block_scale = half_at_least((pattern / largest_quant).max() / largest_scale)
    put_half(block, k_format.scale_byte, block_scale)
    counts = np.ceil(pattern / largest_quant / float(block_scale)).astype(int)
    if signed:
        counts[1::2] *= -1
    for group, count in enumerate(counts):
        set_bits(block, k_format.group_scale(group), stored_scale(k_format, int(count)))
    steps = counts * float(block_scale)
    quants = np.rint((groups + minimums[:, None]) / steps[:, None]).astype(int).reshape(-1)
    for i, quant in enumerate(quants):
        set_bits(block, k_format.quant(i), int(quant) + k_format.quant_zero)
    return bytes(block), np.abs(steps)


@pytest.mark.parametrize("name", K_FORMATS)
def test_k_formats_use_every_bit_of_a_block_once(name: str) -> None:
    k_format = K_FORMATS[name]
    fields = [k_format.quant(i) for i in range(256)]
    for place in (k_format.group_scale, k_format.group_minimum):
        fields += [place(g) for g in range(k_format.num_groups)] if place else []
    for byte in (k_format.scale_byte, k_format.minimum_byte):
        fields += [[(byte, 0, 8), (byte + 1, 0, 8)]] if byte is not None else []
    bits = [(byte, bit + i) for field in fields for byte, bit, width in field for i in range(width)]
    assert sorted(bits) == [(byte, bit) for byte in range(block_type(name).bytes_per_block) for bit in range(8)]


@pytest.mark.parametrize("name", K_FORMATS)
def test_k_formats_are_bit_equal_to_their_definition(name: str) -> None:
    blocks = finite_blocks(name, 12, seed=2)
    expected = np.array([scalar_dequantize(K_FORMATS[name], block.tobytes()) for block in blocks])
    np.testing.assert_array_equal(ours(name, blocks).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", K_FORMATS)
def test_weights_quantized_to_a_k_format_are_within_half_a_step(name: str) -> None:
    generator = np.random.default_rng(3)
    weights = generator.standard_normal((16, 256)) * generator.lognormal(size=(16, 1)) + generator.normal(size=(16, 1))
    stored, steps = zip(*(quantize(name, row) for row in weights), strict=True)
    actual = ours(name, np.frombuffer(b"".join(stored), dtype=np.uint8).reshape(16, -1))
    errors = np.abs(actual - weights).reshape(16, K_FORMATS[name].num_groups, -1)
    bounds = 0.5 * np.stack(steps)[:, :, None]
    assert (errors <= bounds * 1.0001 + 1e-6).all()
    assert (errors.max(axis=2) > 0.5 * bounds[:, :, 0]).mean() > 0.9, "the bound must be reached"
