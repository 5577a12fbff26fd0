"""Attention kernels: the reference against arithmetic in plain Python, the fused kernel against the reference."""

import math
from itertools import product
from threading import Event, Thread

import pytest
import torch
from torch import Tensor

from clearhead.architecture import Bidirectional, Causal, Chunked, SlidingWindow
from clearhead.model.attend import (
    AttentionKernel,
    Scoring,
    attention_steps,
    fused_attention,
    masked_softmax,
    reference_attention,
    without_cudnn,
)
from clearhead.model.masks import AttentionIndices, Mask, make_mask
from tests.model.toys import assert_close

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 6, 8
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def padded_left() -> Tensor:
    real = torch.ones(BATCH, LENGTH)
    real[1, :2] = 0
    return real


TOKENS = torch.zeros(BATCH, LENGTH, dtype=torch.long)
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 1, 1]])
MASKS = {
    "all": Mask(),
    "causal": make_mask(Causal(), AttentionIndices.from_slots(TOKENS)),
    "causal padded": make_mask(Causal(), AttentionIndices.from_slots(TOKENS, padded_left())),
    "all padded": make_mask(Bidirectional(), AttentionIndices.from_slots(TOKENS, padded_left())),
    "window": make_mask(SlidingWindow(size=2), AttentionIndices.from_slots(TOKENS)),
    "chunk padded": make_mask(Chunked(size=2), AttentionIndices.from_slots(TOKENS, padded_left())),
    "documents": make_mask(Causal(), AttentionIndices.from_positions(torch.arange(LENGTH)[None], None, DOCUMENTS)),
    "nothing": Mask(torch.zeros(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)),
}
BIASES = {"none": None, "full": (BATCH, HEADS), "one batch": (1, HEADS), "one head": (BATCH, 1)}


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(num_kv_heads: int = HEADS, value_width: int = WIDTH, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = (HEADS, WIDTH), (num_kv_heads, WIDTH), (num_kv_heads, value_width)
    return [draw(BATCH, heads, LENGTH, width, dtype=dtype, seed=seed) for seed, (heads, width) in enumerate(shapes)]


def dot(first: list[float], second: list[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))


def output_by_hand(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, batch: int, head: int, query: int) -> list[float]:
    """Return the output of one query, computed number by number."""
    group = head // (q.shape[1] // k.shape[1])
    allowed = torch.ones(1, 1, LENGTH, LENGTH).tril() if scoring.mask.causal else scoring.mask.allowed
    scores = []
    for key in range(k.shape[2]):
        score = scoring.scale * dot(q[batch, head, query].tolist(), k[batch, group, key].tolist())
        if scoring.softcap is not None:
            score = scoring.softcap * math.tanh(score / scoring.softcap)
        if scoring.temperature is not None:
            score *= scoring.temperature[0, 0, query, 0].item()
        if scoring.bias is not None:
            score += scoring.bias[batch, head, query, key].item()
        is_allowed = allowed is None or allowed.expand(BATCH, 1, -1, -1)[batch, 0, query, key]
        scores.append(math.exp(score) if is_allowed else 0.0)
    weights = [score / (sum(scores) or 1.0) for score in scores]
    return [dot(weights, v[batch, group, :, n].tolist()) for n in range(v.shape[-1])]


@pytest.mark.parametrize("kernel", [reference_attention, fused_attention])
@pytest.mark.parametrize("name", MASKS)
def test_kernels_equal_arithmetic_by_hand(name, kernel):
    q, k, v = inputs(num_kv_heads=2, value_width=3)
    bias, temperature = draw(BATCH, HEADS, LENGTH, LENGTH, seed=5), 1 + draw(1, 1, LENGTH, 1, seed=6).abs()
    plain = Scoring(mask=MASKS[name], scale=0.4)
    for scoring in (plain, Scoring(MASKS[name], 0.4, softcap=1.5, temperature=temperature, bias=bias)):
        output = kernel(q, k, v, scoring)
        for batch, head, query in product((0, 1), (0, 3), (0, 2, 5)):
            expected = torch.tensor(output_by_hand(q, k, v, scoring, batch, head, query), dtype=torch.float64)
            assert_close(output[batch, head, query], expected)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_fused_equals_reference(name, dtype):
    """For every shape of bias, number of key-value heads and width of the values."""
    for bias_shape, num_kv_heads, value_width in product(BIASES.values(), (1, 2, 4), (WIDTH, 5)):
        q, k, v = inputs(num_kv_heads, value_width, dtype)
        bias = None if bias_shape is None else draw(*bias_shape, LENGTH, LENGTH, dtype=dtype, seed=3)
        scoring = Scoring(mask=MASKS[name], scale=WIDTH**-0.5, bias=bias)
        found, expected = fused_attention(q, k, v, scoring), reference_attention(q, k, v, scoring)
        assert found.dtype == expected.dtype == dtype
        assert_close(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_fused_with_softcap_or_temperature_equals_reference(name, dtype):
    q, k, v = inputs(2, 5, dtype)
    for options in ({"softcap": 2.0}, {"temperature": 1 + draw(1, 1, LENGTH, 1, seed=4).abs()}):
        scoring = Scoring(mask=MASKS[name], scale=WIDTH**-0.5, **options)
        assert torch.equal(fused_attention(q, k, v, scoring), reference_attention(q, k, v, scoring))
        assert fused_attention(q, k, v, scoring).dtype == dtype
        if name != "nothing":
            without = fused_attention(q, k, v, Scoring(mask=MASKS[name], scale=WIDTH**-0.5))
            assert (fused_attention(q, k, v, scoring) - without).abs().max() > 1e-3


@pytest.mark.parametrize("name", MASKS)
def test_gradients_of_both_kernels_are_equal(name):
    def gradients(kernel: AttentionKernel) -> tuple[Tensor, ...]:
        tensors = [tensor.requires_grad_() for tensor in (*inputs(2), draw(1, HEADS, LENGTH, LENGTH, seed=3))]
        *qkv, bias = tensors
        output = kernel(*qkv, Scoring(mask=MASKS[name], scale=0.4, bias=bias))
        return torch.autograd.grad((output * draw(*output.shape, seed=9)).sum(), tensors)

    for found, expected in zip(gradients(fused_attention), gradients(reference_attention), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("shape", [(1, HEADS, 1, LENGTH), (1, 1, LENGTH, 1), (BATCH, HEADS, 1, 1)])
@pytest.mark.parametrize("name", ["causal", "causal padded"])
def test_a_bias_may_be_broadcast_along_queries_or_keys(shape, name):
    q, k, v = inputs()
    bias = draw(*shape, seed=3)
    expanded = bias.expand(BATCH, HEADS, LENGTH, LENGTH).contiguous()
    for kernel in (reference_attention, fused_attention):
        small, large = (kernel(q, k, v, Scoring(mask=MASKS[name], scale=0.4, bias=part)) for part in (bias, expanded))
        assert_close(small, large)


def test_fewer_queries_than_keys_give_the_same_outputs():
    q, k, v = inputs(2)
    for kernel in (reference_attention, fused_attention):
        full = kernel(q, k, v, Scoring(mask=Mask(), scale=0.4))
        assert_close(kernel(q[:, :, 2:4], k, v, Scoring(mask=Mask(), scale=0.4)), full[:, :, 2:4])


def test_attention_steps_return_scores_before_the_mask_and_weights_after():
    q, k, v = inputs()
    found = attention_steps(q, k, v, Scoring(mask=MASKS["causal padded"], scale=0.4))
    assert_close(found.scores, 0.4 * q @ k.transpose(-2, -1))
    assert_close(found.output, found.weights @ v)
    sums = found.weights.sum(dim=-1)
    assert not sums[1, :, :2].any()
    assert_close(sums[0], torch.ones_like(sums[0]))
    assert not found.weights[~MASKS["causal padded"].allowed.expand_as(found.weights)].any()


def test_dropout_zeroes_weights_and_preserves_their_mean():
    """With values of 1, an output is the sum of the remaining weights, times 1 / (1 - p)."""
    q, k = draw(1, 1, 4000, 4), draw(1, 1, 32, 4, seed=1)
    v = torch.ones(1, 1, 32, 1, dtype=torch.float64)
    for kernel in (reference_attention, fused_attention):
        torch.manual_seed(0)
        sums = kernel(q, k, v, Scoring(mask=Mask(), scale=0.5, dropout=0.25)).flatten()
        assert sums.std() > 0.05
        assert abs(sums.mean().item() - 1) < 4 * sums.std().item() / math.sqrt(len(sums))


def test_softmax_is_computed_in_at_least_float32():
    """2000 equal weights of 1/2000 still sum to 1 for half-precision scores."""
    weights = masked_softmax(torch.zeros(1, 2000, dtype=torch.float16), None)
    assert weights.dtype == torch.float32
    assert_close(weights.sum(), torch.tensor(1.0), 1e-5)
    assert masked_softmax(torch.zeros(2, dtype=torch.float64), None).dtype == torch.float64


def test_softmax_of_scores_far_apart_does_not_overflow():
    scores = torch.tensor([[1e4, -1e4, 0.0]])
    allowed = torch.tensor([[False, True, True]])
    assert torch.equal(masked_softmax(scores, allowed), torch.tensor([[0.0, 0.0, 1.0]]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_kv_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("kind", ["one query", "masked", "biased"])
def test_growing_lengths_on_cuda_equal_the_reference_and_leave_cudnn_enabled(
    kind: str, num_kv_heads: int, dtype: torch.dtype
) -> None:
    num_queries, num_keys, width = 1 if kind == "one query" else 5, 37, 64
    q = draw(BATCH, HEADS, num_queries, width, dtype=dtype, seed=1).cuda()
    k, v = (draw(BATCH, num_kv_heads, num_keys, width, dtype=dtype, seed=seed).cuda() for seed in (2, 3))
    allowed = torch.ones(BATCH, 1, num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    allowed[1, :, :2] = False  # two padding tokens, which attend to nothing
    bias = draw(1, HEADS, num_queries, num_keys, dtype=dtype).cuda() if kind == "biased" else None
    scoring = Scoring(Mask(None if kind == "one query" else allowed.cuda()), scale=0.125, bias=bias)
    with torch.no_grad():
        found = fused_attention(q, k, v, scoring)
    torch.testing.assert_close(
        found, reference_attention(q, k, v, scoring), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_concurrent_threads_restore_the_cudnn_setting() -> None:
    entered, leave = Event(), Event()

    def attend() -> None:
        with without_cudnn():
            entered.set()
            leave.wait(5)

    other = Thread(target=attend)
    with without_cudnn():
        other.start()
        entered.wait(0.2)
    leave.set()
    other.join()
    assert torch.backends.cuda.cudnn_sdp_enabled()
