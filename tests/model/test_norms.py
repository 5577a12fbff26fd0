"""Norms against those of torch and transformers, in every precision."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from clearhead.architecture import DeviationNorm, LayerNorm, RmsNorm
from clearhead.model.norms import build_norm, root_mean_square
from tests.model.toys import assert_close, redraw

WIDTH, EPSILON = 12, 1e-3


def draw(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (3 * torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0)) + 1).to(dtype)


def test_rms_norm_equals_torch():
    ours, theirs = build_norm(RmsNorm(epsilon=EPSILON), WIDTH), nn.RMSNorm(WIDTH, eps=EPSILON)
    redraw(ours)
    theirs.load_state_dict(ours.state_dict())
    assert_close(ours.double()(draw()), theirs.double()(draw()))


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_equals_its_formula(bias):
    ours = build_norm(LayerNorm(epsilon=EPSILON, bias=bias), WIDTH)
    redraw(ours)
    x = draw()
    centered = x - x.mean(dim=-1, keepdim=True)
    normed = centered / (centered.square().mean(dim=-1, keepdim=True) + EPSILON).sqrt()
    ours.double()
    assert_close(ours(x), normed * ours.weight + (ours.bias if bias else 0.0))
    assert len(list(ours.parameters())) == 1 + bias


def test_deviation_norm_divides_by_the_unbiased_deviation_plus_epsilon():
    """It differs from layer norm in the Bessel correction and in the epsilon outside the root."""
    ours = build_norm(DeviationNorm(epsilon=EPSILON), WIDTH).double()
    x = draw()
    centered = x - x.mean(dim=-1, keepdim=True)
    deviation = (centered.square().sum(dim=-1, keepdim=True) / (WIDTH - 1)).sqrt()
    assert_close(ours(x), centered / (deviation + EPSILON))
    redraw(ours)
    assert_close(ours(x), ours.weight * centered / (deviation + EPSILON) + ours.bias)
    assert (ours(x) - build_norm(LayerNorm(epsilon=EPSILON), WIDTH).double()(x)).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rms_norm_equals_llama_to_the_last_bit(dtype):
    """Llama normalizes in float32, rounds, then multiplies by the weight."""
    ours, theirs = build_norm(RmsNorm(epsilon=EPSILON), WIDTH), LlamaRMSNorm(WIDTH, EPSILON)
    redraw(ours)
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours.to(dtype)(draw(dtype)), theirs.to(dtype)(draw(dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rms_norm_with_unit_offset_equals_gemma_to_the_last_bit(dtype):
    config = RmsNorm(epsilon=EPSILON, unit_offset=True, scale_in_float32=True)
    ours, theirs = build_norm(config, WIDTH), Gemma3RMSNorm(WIDTH, EPSILON)
    redraw(ours)
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours.to(dtype)(draw(dtype)), theirs.to(dtype)(draw(dtype)))


@pytest.mark.parametrize("offset", [False, True])
def test_scale_in_float32_multiplies_before_rounding(offset):
    config = RmsNorm(epsilon=EPSILON, unit_offset=offset, scale_in_float32=True)
    ours, plain = build_norm(config, WIDTH), build_norm(replace(config, scale_in_float32=False), WIDTH)
    redraw(ours)
    plain.load_state_dict(ours.state_dict())
    x = draw(torch.bfloat16)
    ours, plain = ours.to(torch.bfloat16), plain.to(torch.bfloat16)
    normed = root_mean_square(x, EPSILON)
    assert torch.equal(ours(x), (normed * (offset + ours.weight.float())).to(torch.bfloat16))
    assert torch.equal(plain(x), normed.to(torch.bfloat16) * (offset + ours.weight))
    assert not torch.equal(plain(x), ours(x))
    assert_close(ours.float()(x.float()), plain.float()(x.float()), 1e-6)


@pytest.mark.parametrize(
    "config", [RmsNorm(epsilon=1e-6), RmsNorm(epsilon=1e-6, unit_offset=True), LayerNorm(epsilon=1e-5)], ids=str
)
def test_initial_norms_ignore_magnitude_and_map_zero_to_zero(config):
    norm = build_norm(config, WIDTH)
    x = draw(torch.float32)
    assert_close(norm(x), norm(5 * x), 1e-4)
    assert not norm(torch.zeros(1, WIDTH)).any()
    if isinstance(config, RmsNorm):
        assert_close(norm(x).square().mean(dim=-1), torch.ones(2, 5), 1e-5)


@pytest.mark.parametrize("config", [RmsNorm(epsilon=1e-6), DeviationNorm(epsilon=1e-6)], ids=str)
def test_large_half_precision_vectors_do_not_overflow(config):
    """300² exceeds the largest float16."""
    x = torch.full((1, WIDTH), 300.0, dtype=torch.float16)
    x[0, 0] = -300.0
    assert build_norm(config, WIDTH).half()(x).isfinite().all()
