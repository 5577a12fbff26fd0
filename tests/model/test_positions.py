"""Position encodings against transformers, and edge cases."""

import math

import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.xlm.modeling_xlm import create_sinusoidal_embeddings

from clearhead.architecture import (
    Alibi,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RelativeBuckets,
    Rope,
    SinusoidalPositions,
    YarnScaling,
)
from clearhead.model.positions import (
    alibi_bias,
    alibi_slopes,
    make_rotation,
    relative_position_bucket,
    rope_frequencies,
    sinusoids,
)
from tests.model.toys import assert_close

# --- added to embeddings


def xlm_table(num_positions: int, width: int) -> Tensor:
    table = torch.empty(num_positions, width)
    create_sinusoidal_embeddings(num_positions, width, table)
    return table


SINUSOIDS = {
    "interleaved": xlm_table,
    "halves": lambda num_positions, width: MarianSinusoidalPositionalEmbedding(num_positions, width).create_weight(),
    "halves_to_end": M2M100SinusoidalPositionalEmbedding.get_embedding,
}


@pytest.mark.parametrize("layout", SINUSOIDS)
def test_sinusoids_equal_those_of_released_models(layout):
    found = sinusoids(torch.arange(300), 12, SinusoidalPositions(layout=layout), torch.float32)
    tolerance = 3e-5 if layout == "halves_to_end" else 1e-7  # transformers computes the angles in float32
    assert_close(found, SINUSOIDS[layout](300, 12), tolerance)


@pytest.mark.parametrize("layout", SINUSOIDS)
@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_sinusoids_of_any_width_are_finite(layout, width):
    table = sinusoids(torch.arange(9), width, SinusoidalPositions(layout=layout), torch.float64)
    assert table.shape == (9, width)
    assert table.isfinite().all()
    assert_close(table[:, 0], torch.arange(9.0, dtype=torch.float64).sin())


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_sinusoids_of_large_positions_are_accurate_in_float32(layout):
    position = torch.tensor([1_000_000])
    single, double = (
        sinusoids(position, 8, SinusoidalPositions(layout=layout), dtype) for dtype in (torch.float32, torch.float64)
    )
    assert_close(single.double(), double, 1e-7)


# --- rotated into queries and keys

WIDTH, ORIGINAL = 16, 32
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL}
YARN = {"beta_fast": 4.0, "beta_slow": 0.5, "original_max_position_embeddings": ORIGINAL, "attention_factor": 1.2}
SCALINGS = {
    "linear": (LinearScaling(factor=4.0), {}),
    "dynamic": (DynamicScaling(factor=4.0, original_context=ORIGINAL), {}),
    "llama3": (
        Llama3Scaling(factor=4.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=ORIGINAL),
        LLAMA3,
    ),
    "yarn": (
        YarnScaling(factor=4.0, original_context=ORIGINAL, attention_factor=1.2, beta_fast=4.0, beta_slow=0.5),
        YARN,
    ),
    "yarn untruncated": (
        YarnScaling(
            factor=4.0,
            original_context=ORIGINAL,
            attention_factor=1.2,
            beta_fast=4.0,
            beta_slow=0.5,
            truncate=False,
        ),
        YARN | {"truncate": False},
    ),
}


def transformers_frequencies(kind: str, settings: dict[str, float], length: int) -> tuple[Tensor, float]:
    """Return the frequencies and the attention factor that transformers computes."""
    kind = kind.split()[0]
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        num_attention_heads=1,
        max_position_embeddings=ORIGINAL,
        rope_parameters={"rope_type": kind, "rope_theta": 1000.0, "factor": 4.0, **settings},
    )
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("length", [20, 100])
def test_scaled_frequencies_equal_those_of_transformers(kind, length):
    scaling, settings = SCALINGS[kind]
    expected, factor = transformers_frequencies(kind, settings, length)
    rope = Rope(theta=1000.0, scaling=scaling)
    positions = torch.arange(length)[None]
    assert_close(rope_frequencies(rope, positions, WIDTH, torch.float32).flatten(), expected, 1e-6)
    found = make_rotation(rope, positions, WIDTH, torch.float32)
    angles = positions[0, :, None] * expected
    assert_close(found.cosine[0, 0], angles.cos() * factor, 2e-5)
    assert_close(found.sine[0, 0], angles.sin() * factor, 2e-5)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "yarn untruncated"])
def test_scaling_never_increases_a_frequency(kind):
    positions = torch.arange(4)[None]
    plain = rope_frequencies(Rope(), positions, WIDTH, torch.float64)
    scaled = rope_frequencies(Rope(scaling=SCALINGS[kind][0]), positions, WIDTH, torch.float64)
    assert (scaled <= plain).all()
    assert (scaled >= plain / 4).all()
    assert_close(scaled[-1], plain[-1] / 4)


def test_llama3_scaling_with_equal_factors_is_a_step():
    """Llama 4 Scout has low = high = 1: pairs with less than one rotation in the original context are scaled."""
    scaling = Llama3Scaling(factor=16.0, low_frequency_factor=1.0, high_frequency_factor=1.0, original_context=ORIGINAL)
    positions = torch.arange(4)[None]
    plain = rope_frequencies(Rope(), positions, WIDTH, torch.float64)
    scaled = rope_frequencies(Rope(scaling=scaling), positions, WIDTH, torch.float64)
    is_scaled = plain * ORIGINAL < 2 * math.pi
    assert 0 < is_scaled.sum() < len(plain)
    assert_close(scaled, torch.where(is_scaled, plain / 16, plain))


def test_half_pairing_equals_llama():
    q = torch.randn(2, 3, 5, WIDTH, generator=torch.Generator().manual_seed(0))
    rotation = make_rotation(Rope(), torch.arange(5)[None], WIDTH, torch.float32)
    doubled = (torch.cat((part[:, 0], part[:, 0]), dim=-1) for part in (rotation.cosine, rotation.sine))
    expected, _ = apply_rotary_pos_emb(q, q, *doubled)
    assert_close(rotation.rotate(q), expected, 1e-6)


def test_each_sequence_is_rotated_by_its_own_positions():
    x = torch.randn(2, 1, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3], [0, 0, 5, 6]])
    both = make_rotation(Rope(), positions, 8, torch.float64).rotate(x)
    for row in range(2):
        alone = make_rotation(Rope(), positions[row : row + 1], 8, torch.float64).rotate(x[row : row + 1])
        assert torch.equal(both[row : row + 1], alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_angles_are_computed_in_float32_and_cosines_then_rounded(dtype):
    """bfloat16 cannot represent position 1001."""
    positions = torch.tensor([[1001]])
    found, precise = (make_rotation(Rope(), positions, 8, precision) for precision in (dtype, torch.float32))
    assert torch.equal(found.cosine, precise.cosine.to(dtype))
    assert torch.equal(found.sine, precise.sine.to(dtype))


# --- added to scores


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (4, 3)])
def test_buckets_equal_those_of_t5(bidirectional, num_buckets, max_distance):
    config = RelativeBuckets(num_buckets=num_buckets, max_distance=max_distance, bidirectional=bidirectional)
    distance = torch.arange(-300, 301)
    expected = T5Attention._relative_position_bucket(-distance, bidirectional, num_buckets, max_distance)
    assert torch.equal(relative_position_bucket(distance, config), expected)
    assert relative_position_bucket(distance, config).max() == num_buckets - 1


@pytest.mark.parametrize("num_heads", [1, 3, 8, 12, 16])
def test_alibi_equals_that_of_bloom(num_heads):
    """BLOOM adds slope · key position, which differs from ours by a constant per query that softmax cancels."""
    length = 7
    theirs = build_alibi_tensor(torch.ones(1, length), num_heads, torch.float64).view(num_heads, 1, length)
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    ours = alibi_bias(distance[None], num_heads, Alibi(), torch.float64)[0]
    last_row = ours[:, -1:]
    assert_close(last_row - last_row[..., :1], theirs, 1e-6)
    assert torch.equal(ours[:, 0, 0], torch.zeros(num_heads, dtype=torch.float64))


def test_alibi_slopes_of_eight_heads_are_powers_of_one_half():
    assert alibi_slopes(8, Alibi()) == [2.0**-k for k in range(1, 9)]
    assert alibi_slopes(2, Alibi(max_bias=4.0)) == [2.0**-2, 2.0**-4]
