"""Part B of the book, positions, statement by statement: B1 and B2, absolute and rotary positions."""

import math

import pytest
import torch
from torch import Tensor

from clearhead.architecture import DynamicScaling, Embedding, LearnedPositions, Rope, SinusoidalPositions
from clearhead.errors import ClearheadError
from clearhead.model.embedding import TokenEmbedding
from clearhead.model.positions import make_rotation, rope_frequencies, sinusoids
from tests.book.golden import golden, golden_value
from tests.model.toys import (
    CONTEXT,
    RecordingKernel,
    assert_close,
    decoder,
    redraw,
    some_tokens,
    toy,
)

PAIRINGS = ["half", "interleaved"]


# --- B1


def sinusoidal_table(num_positions: int, width: int) -> Tensor:
    return sinusoids(torch.arange(num_positions), width, SinusoidalPositions(), torch.float64)


def test_b1_sinusoids_of_the_worked_example():
    table = sinusoidal_table(2, golden_value("sinusoidal", "width"))
    assert_close(table, golden("sinusoidal", "table"))
    assert_close(table, golden("sinusoidal", "printed"), tolerance=3e-6)


def test_b1_sinusoids_are_added_to_the_embeddings():
    config = Embedding(vocab_size=5, positions=SinusoidalPositions())
    embedding = TokenEmbedding(config, width=4, dropout=0.0)
    redraw(embedding)
    embedding.double()
    vectors = embedding(torch.tensor([[3, 3]]), torch.arange(2)[None])[0]
    assert_close(vectors - embedding.tokens.weight[3], golden("sinusoidal", "table"))


def test_b1_sinusoids_are_unique_per_position():
    table = sinusoidal_table(5000, 16)
    assert len(table.unique(dim=0)) == 5000
    smallest_distance = (torch.cdist(table, table) + 9 * torch.eye(5000)).min()
    assert smallest_distance > 0.1


def test_b1_frequencies_decrease_with_the_dimension_like_the_bits_of_a_counter():
    """Bit b of a counter flips every 2^b steps; entry 2k changes sign every π·10000^(2k/D) steps."""
    width, num_positions = 16, 20_000
    sines = sinusoidal_table(num_positions, width)[:, ::2]
    flips = (sines[1:-1].sign() != sines[2:].sign()).sum(dim=0)
    assert (flips.diff() < 0).all()
    for k, count in enumerate(flips.tolist()):
        assert abs(count - (num_positions - 2) / (math.pi * 10000 ** (2 * k / width))) <= 1


def test_b1_sinusoids_have_no_parameters():
    assert {name for name, _ in toy(decoder(SinusoidalPositions())).named_parameters()} == {
        name for name, _ in toy(decoder()).named_parameters()
    }


def test_b1_learned_positions_are_one_trained_vector_per_position():
    network = toy(decoder(LearnedPositions(num_positions=CONTEXT)))
    table = network.decoder.embedding.positions.weight
    assert table.shape == (CONTEXT, 16)
    tokens = torch.full((1, 6), 3)
    vectors = network.decoder.embedding(tokens, torch.arange(6)[None])[0]
    assert_close(vectors - network.decoder.embedding.tokens.weight[3], table[:6])
    network(tokens).square().sum().backward()
    assert table.grad[:6].all()
    assert not table.grad[6:].any()


def test_b1_learned_positions_limit_the_length():
    network = toy(decoder(LearnedPositions(num_positions=CONTEXT)))
    assert network(some_tokens(1, CONTEXT)).isfinite().all()
    with pytest.raises(ClearheadError, match=f"position {CONTEXT} is out of range"):
        network(some_tokens(1, CONTEXT + 1))


# --- B2


def rotated(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Rotate one head x (T, H) at positions (T,)."""
    return make_rotation(rope, positions[None], x.shape[-1], x.dtype).rotate(x[None, None])[0, 0]


def random_rows(num: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(num, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_b2_rope_in_two_dimensions_is_a_rotation_by_the_position(pairing):
    for position in (0, 1, 5):
        angle = torch.tensor(float(position), dtype=torch.float64)
        matrix = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos())).view(2, 2)
        x = random_rows(1, 2)
        assert_close(rotated(x, torch.tensor([position]), Rope(pairing=pairing))[0], matrix @ x[0])


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_b2_rope_is_multiplication_by_e_to_the_j_t_omega(pairing):
    """ω_i = 10000^(-2(i-1)/d), i from 1."""
    width, positions = 8, torch.tensor([0, 1, 7, 300])
    omega = torch.tensor([10000 ** (-2 * (i - 1) / width) for i in range(1, width // 2 + 1)], dtype=torch.float64)

    def as_complex(x: Tensor) -> Tensor:
        return torch.complex(x[:, ::2], x[:, 1::2]) if pairing == "interleaved" else torch.complex(*x.chunk(2, dim=1))

    x = random_rows(4, width)
    expected = as_complex(x) * torch.exp(1j * positions[:, None] * omega)
    found = as_complex(rotated(x, positions, Rope(pairing=pairing)))
    assert_close(found, expected)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_b2_rope_has_no_learnable_parameters(pairing):
    with_rope, without = toy(decoder(Rope(pairing=pairing))), toy(decoder())
    assert with_rope.state_dict().keys() == without.state_dict().keys()


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_b2_queries_and_keys_are_rotated_and_values_are_not(pairing):
    network, tokens = toy(decoder(Rope(pairing=pairing))), some_tokens(1)
    unshifted, shifted = RecordingKernel(), RecordingKernel()
    network(tokens, position_ids=torch.arange(8)[None], kernel=unshifted)
    network(tokens, position_ids=torch.arange(8)[None] + 3, kernel=shifted)
    assert torch.equal(unshifted.values[0], shifted.values[0])
    assert (unshifted.queries[0] - shifted.queries[0]).abs().max() > 0.1
    assert (unshifted.keys[0] - shifted.keys[0]).abs().max() > 0.1
    for first, second in ((unshifted.queries[0], shifted.queries[0]), (unshifted.keys[0], shifted.keys[0])):
        assert_close(first.norm(dim=-1), second.norm(dim=-1))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_b2_the_score_depends_on_the_distance_only(pairing):
    rope, (q, k) = Rope(pairing=pairing), random_rows(2, 8)

    def score(m: int, n: int) -> Tensor:
        return rotated(q[None], torch.tensor([m]), rope)[0] @ rotated(k[None], torch.tensor([n]), rope)[0]

    for m, n in ((5, 2), (1, 9), (4, 4)):
        for shift in (1, 10, 1000):
            assert_close(score(m + shift, n + shift), score(m, n), tolerance=1e-10)
    assert (score(5, 2) - score(5, 3)).abs() > 1e-3
    assert_close(score(4, 4), q @ k)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_b2_shifting_all_positions_changes_no_logit(pairing):
    network, tokens = toy(decoder(Rope(pairing=pairing))), some_tokens()
    shifted = network(tokens, position_ids=torch.arange(8)[None] + 100)
    assert_close(shifted, network(tokens), tolerance=1e-10)
    stretched = network(tokens, position_ids=2 * torch.arange(8)[None])
    assert (stretched - network(tokens)).abs().max() > 1e-2


def rotation_matrix(position: int, width: int, pairing: str) -> Tensor:
    unit = torch.eye(width, dtype=torch.float64)
    return rotated(unit, torch.full((width,), position), Rope(pairing=pairing)).T


def test_b2_the_matrix_is_block_diagonal_with_two_by_two_rotations():
    matrix, blocks = rotation_matrix(3, 6, "interleaved"), torch.zeros(6, 6, dtype=torch.float64)
    for k in range(3):
        angle = 3 * 10000 ** (-2 * k / 6)
        cosine, sine = math.cos(angle), math.sin(angle)
        blocks[2 * k : 2 * k + 2, 2 * k : 2 * k + 2] = torch.tensor(
            [[cosine, -sine], [sine, cosine]], dtype=torch.float64
        )
    assert_close(matrix, blocks)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_b2_the_matrix_between_i_and_j_is_the_rotation_by_their_distance(pairing):
    i, j = rotation_matrix(11, 8, pairing), rotation_matrix(4, 8, pairing)
    assert_close(i.T @ i, torch.eye(8, dtype=torch.float64))
    assert_close(j.T @ i, rotation_matrix(7, 8, pairing))


def test_b2_both_pairings_are_equal_up_to_the_order_of_the_entries():
    order = torch.cat((torch.arange(0, 8, 2), torch.arange(1, 8, 2)))  # 0 2 4 6 1 3 5 7
    x, positions = random_rows(5, 8), torch.arange(5)
    assert_close(rotated(x[:, order], positions, Rope()), rotated(x, positions, Rope(pairing="interleaved"))[:, order])


def test_b2_a_rotation_leaves_the_entries_beyond_its_width_unchanged():
    rotation = make_rotation(Rope(width=4), torch.arange(5)[None], 8, torch.float64)
    x = random_rows(5, 8)
    assert torch.equal(rotation.rotate(x[None, None])[0, 0, :, 4:], x[:, 4:])


def test_b2_dynamic_scaling_lowers_frequencies_beyond_the_original_context():
    rope = Rope(scaling=DynamicScaling(factor=2.0, original_context=16))

    def frequencies(length: int) -> Tensor:
        return rope_frequencies(rope, torch.arange(length)[None], 8, torch.float64).flatten()

    plain_frequencies = rope_frequencies(Rope(), torch.arange(16)[None], 8, torch.float64)
    assert_close(frequencies(16), plain_frequencies)
    assert_close(frequencies(3), plain_frequencies)
    longer, longest = frequencies(32), frequencies(64)
    assert longer[0] == longest[0] == 1.0
    assert (longer[1:] < plain_frequencies[1:]).all()
    assert (longest[1:] < longer[1:]).all()
    # θ' = θ·(factor·length/original - (factor - 1))^(d/(d-2)): the lowest frequency is divided by that bracket
    assert_close(longest[-1], plain_frequencies[-1] / (2 * 64 / 16 - 1))
