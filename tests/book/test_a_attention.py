"""Part A of the book, attention, statement by statement: A1 to A6, with one head."""

import math

import pytest
import torch
from torch import Tensor

from clearhead.architecture import Causal, GroupedAttention, Rope
from clearhead.model.attend import AttentionSteps, Scoring, attention_steps, fused_attention, reference_attention
from clearhead.model.attention import Attention
from clearhead.model.masks import AttentionIndices, Mask, make_mask
from tests.book.golden import golden, golden_value
from tests.model.toys import (
    assert_close,
    attention_context,
    decoder,
    some_tokens,
    toy,
)

KERNELS = [reference_attention, fused_attention]
ALL = Mask()


@torch.no_grad()
def attention_with(w_q: Tensor, w_k: Tensor, w_v: Tensor, **changes: object) -> Attention:
    """Return an attention layer with one head, these matrices (x·W as in the book), and no output projection."""
    width, head, value = *w_q.shape, w_v.shape[1]
    config = GroupedAttention(num_heads=1, num_kv_heads=1, head_width=head, value_width=value, **changes)
    attention = Attention(config, width).double()
    for linear, matrix in ((attention.query, w_q), (attention.key, w_k), (attention.value, w_v)):
        linear.weight.copy_(matrix.T)
    attention.output.weight.copy_(torch.eye(width, value))
    return attention


def worked_example(**changes: object) -> Attention:
    """Return the attention layer of the book's worked example."""
    return attention_with(golden("qkv", "W_q"), golden("qkv", "W_k"), golden("qkv", "W_v"), **changes)


def attend_to(scores: Tensor, mask: Mask = ALL, **options: object) -> AttentionSteps:
    """Run the kernel on given scores (T, S): the queries are the scores, the keys and values are unit vectors."""
    unit = torch.eye(scores.shape[-1], dtype=scores.dtype)[None, None]
    return attention_steps(scores[None, None], unit, unit, Scoring(mask=mask, **({"scale": 1.0} | options)))


def projected(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values."""
    heads, kv_heads = attention.config.num_heads, attention.config.num_kv_heads
    return (
        attention.project(attention.query, x, heads),
        attention.project(attention.key, x, kv_heads),
        attention.project(attention.value, x, kv_heads),
    )


# --- A1


def test_a1_queries_keys_and_values_of_the_worked_example():
    x = golden("qkv", "x")[None]
    for found, name in zip(projected(worked_example(), x), ("q", "k", "v"), strict=True):
        assert torch.equal(found[0, 0], golden("qkv", name))


def test_a1_projecting_all_rows_equals_projecting_each_vector():
    attention, x = worked_example(), golden("qkv", "x")[None]
    for rows, *vectors in zip(
        projected(attention, x), *(projected(attention, row) for row in x.split(1, dim=1)), strict=True
    ):
        assert_close(rows, torch.cat(vectors, dim=2))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a1_output_of_the_worked_example(kernel):
    """Keys have width 3, values have width 2."""
    output = worked_example(scale=1.0)(golden("qkv", "x")[None], attention_context(Mask(), kernel, 3))[0]
    assert_close(output, golden("qkv", "output"))
    assert_close(output[2], golden("qkv", "printed", "output_row3"), tolerance=7e-4)


# --- A2


def test_a2_entry_i_j_of_the_scores_is_query_i_times_key_j():
    attention, x = worked_example(), golden("qkv", "x")[None]
    q, k, v = projected(attention, x)
    found = attention_steps(q, k, v, Scoring(mask=Mask(), scale=1.0))
    assert torch.equal(found.scores[0, 0], golden("qkv", "scores"))
    for i in range(3):
        for j in range(3):
            assert found.scores[0, 0, i, j] == q[0, 0, i].dot(k[0, 0, j])
    assert_close(found.weights[0, 0], golden("qkv", "weights"))
    assert_close(found.weights[0, 0, 2], golden("qkv", "printed", "weights_row3"), tolerance=3e-6)


def test_a2_the_scale_is_one_over_the_root_of_the_key_width():
    """The scores 2, 8 and -20 are divided by √3 by default."""
    attention, x = worked_example(), golden("qkv", "x")[None]
    weights = (golden("qkv", "scores") / math.sqrt(3)).softmax(dim=-1)
    assert_close(attention(x, attention_context(Mask(), reference_attention, 3))[0], weights @ golden("qkv", "v"))


def test_a2_row_i_of_the_output_is_the_weighted_sum_of_values(generator):
    q, k, v = (torch.randn(1, 1, 5, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    found = attention_steps(q, k, v, Scoring(mask=Mask(), scale=3**-0.5))
    for i in range(5):
        assert_close(found.output[0, 0, i], sum(found.weights[0, 0, i, j] * v[0, 0, j] for j in range(5)))


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True)], ids=["all", "causal"])
def test_a2_rows_of_weights_sum_to_one(mask, generator):
    q, k, v = (3 * torch.randn(2, 4, 7, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    weights = attention_steps(q, k, v, Scoring(mask=mask, scale=8**-0.5)).weights
    assert (weights >= 0).all()
    assert_close(weights.sum(dim=-1), torch.ones(2, 4, 7, dtype=torch.float64))


def test_a2_two_keys_with_scaled_scores_14_and_12():
    q = torch.zeros(1, 1, 1, 64, dtype=torch.float64)
    q[..., :2] = torch.tensor([112.0, 96.0])
    k = torch.eye(2, 64, dtype=torch.float64)[None, None]
    found = attention_steps(q, k, k, Scoring(mask=Mask(), scale=64**-0.5))
    assert torch.equal(found.scores[0, 0, 0], golden("thinking", "scores"))
    assert_close(found.weights[0, 0, 0], golden("thinking", "weights"))
    assert_close(found.weights[0, 0, 0], golden("thinking", "printed"), tolerance=1e-3)


# --- A3


def sampled_scores(width: int, mean: float, deviation: float, scale: float) -> Tensor:
    """Return 40000 independent scores q·k of normal q and k, computed by the kernel."""
    generator = torch.Generator().manual_seed(width)
    q, k = (mean + deviation * torch.randn(40_000, 1, 1, width, generator=generator) for _ in range(2))
    return attention_steps(q, k, k, Scoring(mask=Mask(), scale=scale)).scores.double().flatten()


def assert_variance(samples: Tensor, expected: float, width: int) -> None:
    """Check the variance within four standard errors. The excess kurtosis of a sum of `width` products is 6 / width."""
    standard_error = expected * math.sqrt((2 + 6 / width) / len(samples))
    assert abs(samples.var().item() - expected) < 4 * standard_error


@pytest.mark.parametrize("width", [4, 64])
@pytest.mark.parametrize("deviation", [1.0, 0.5])
def test_a3_variance_of_a_score_is_width_times_the_fourth_power_of_the_deviation(width, deviation):
    samples = sampled_scores(width, 0.0, deviation, scale=1.0)
    assert_variance(samples, width * deviation**4, width)
    assert abs(samples.mean().item()) < 4 * math.sqrt(width * deviation**4 / len(samples))


@pytest.mark.parametrize("width", [4, 64])
def test_a3_mean_of_a_score_is_width_times_the_squared_mean(width):
    mean = 0.7
    samples = sampled_scores(width, mean, 1.0, scale=1.0)
    variance = width * (1 + 2 * mean**2)  # of q·k, where q and k have the same mean
    assert abs(samples.mean().item() - width * mean**2) < 4 * math.sqrt(variance / len(samples))


@pytest.mark.parametrize("width", [4, 64])
def test_a3_the_default_scale_gives_variance_one(width):
    attention = Attention(GroupedAttention(num_heads=1, num_kv_heads=1, head_width=width), width=8)
    assert_variance(sampled_scores(width, 0.0, 1.0, attention.scale), 1.0, width)


def test_a3_softmax_saturates_without_the_scale(generator):
    """The largest weight is nearly 1, and the median query gets almost no gradient."""
    width, num_keys = 1024, 32
    k = torch.randn(1, 1, num_keys, width, generator=generator)
    largest, gradient = {}, {}
    for scale in (width**-0.5, 1.0):
        q = torch.randn(1, 1, 200, width, generator=torch.Generator().manual_seed(1)).requires_grad_()
        weights = attention_steps(q, k, k, Scoring(mask=Mask(), scale=scale)).weights
        weights.amax(dim=-1).sum().backward()
        largest[scale] = weights.amax(dim=-1).mean().item()
        gradient[scale] = q.grad.norm(dim=-1).median().item() / scale  # gradient of the scaled scores
    assert largest[width**-0.5] < 0.3
    assert largest[1.0] > 0.9
    assert gradient[1.0] < 0.05 * gradient[width**-0.5]


# --- A5


def test_a5_adding_minus_infinity_above_the_diagonal_equals_the_causal_mask():
    scores = golden("masked_scores", "scores")
    added = torch.full((12, 12), -torch.inf, dtype=torch.float64).triu(diagonal=1)
    selected = attend_to(scores, Mask(causal=True)).weights
    assert torch.equal(attend_to(scores, bias=added).weights, selected)
    assert torch.equal(
        make_mask(Causal(), AttentionIndices.from_slots(torch.zeros(1, 12), torch.ones(1, 12))).allowed[0, 0],
        added == 0,
    )


def test_a5_causal_weights_of_the_printed_scores():
    weights = attend_to(golden("masked_scores", "scores"), Mask(causal=True)).weights[0, 0]
    assert_close(weights, golden("masked_scores", "causal_weights"))
    assert_close(weights.sum(dim=-1), torch.ones(12, dtype=torch.float64))


def test_a5_fused_kernel_gives_the_same_causal_weights():
    scores, unit = golden("masked_scores", "scores")[None, None], torch.eye(12, dtype=torch.float64)[None, None]
    weights = fused_attention(scores, unit, unit, Scoring(mask=Mask(causal=True), scale=1.0))[0, 0]
    assert_close(weights, golden("masked_scores", "causal_weights"))


def test_a5_masking_after_the_softmax_leaves_rows_that_do_not_sum_to_one():
    scores = golden("masked_scores", "scores")
    after = attend_to(scores).weights[0, 0].tril()
    assert_close(after, golden("masked_scores", "mask_after_softmax"))
    assert_close(after.sum(dim=-1), golden("masked_scores", "row_sums_after"))
    assert (after.sum(dim=-1)[:-1] < 0.999).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a5_no_token_depends_on_a_later_one(kernel):
    network, tokens = toy(decoder(Rope())), some_tokens()
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 29
    before, after = network(tokens, kernel=kernel), network(changed, kernel=kernel)
    assert_close(after[:, :5], before[:, :5])
    assert (after[:, 5:] - before[:, 5:]).abs().min(dim=-1).values.max() > 1e-3


# --- A6


@pytest.mark.parametrize("name", ["A", "B", "C", "D"])
def test_a6_weights_of_the_heatmaps(name):
    """A is uniform, B diagonal, C causal, D shifted. Minus infinity is given as a mask and as a bias."""
    scores, expected = golden("heatmaps", "matrices", name), golden("heatmaps", "weights", name)
    allowed = scores.isfinite()
    finite = scores.masked_fill(~allowed, 0.0)
    assert_close(attend_to(finite, Mask(allowed)).weights[0, 0], expected)
    assert_close(attend_to(finite, bias=scores - finite).weights[0, 0], expected)


def test_a6_heatmap_c_is_the_causal_mask():
    assert_close(
        attend_to(torch.full((4, 4), 5.0, dtype=torch.float64), Mask(causal=True)).weights[0, 0],
        golden("heatmaps", "weights", "C"),
    )


@pytest.mark.parametrize("number", range(6))
def test_a6_temperature_divides_the_scores(number):
    temperature = golden_value("temperature", "temperatures")[number]
    weights = attend_to(golden("temperature", "row")[None], scale=1 / temperature).weights[0, 0, 0]
    assert_close(weights, golden("temperature", "weights")[number])


@pytest.mark.parametrize(("temperature", "limit"), [(1e-3, "to_zero"), (1e12, "to_infinity")])
def test_a6_temperature_goes_from_one_hot_to_uniform(temperature, limit):
    weights = attend_to(golden("temperature", "row")[None], scale=1 / temperature).weights[0, 0, 0]
    assert_close(weights, golden("temperature", "limits", limit), tolerance=1e-11)
