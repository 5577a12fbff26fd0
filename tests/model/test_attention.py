"""Everything an attention layer does before the kernel, each option against its formula."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from clearhead.architecture import (
    HeadNorm,
    QueryTemperature,
    RelativeSinusoid,
    RmsNorm,
    Rope,
    RotatedHeadNorm,
    ScoreTemperature,
    SinusoidalPositions,
)
from clearhead.model.attention import Attention, merge_heads, split_heads
from clearhead.model.positions import make_rotation, sinusoids
from tests.model.toys import WIDTH, RecordingKernel, assert_close, decoder, latent, some_tokens, stack, toy

LENGTH, HEADS, HEAD = 6, 4, 4


def kernel_inputs(**changes: Any) -> tuple[RecordingKernel, Attention, Tensor]:
    """Run a toy decoder. Return the recorded kernel calls, its first attention layer, and the input of that layer."""
    network, kernel, inputs = toy(decoder(**changes)), RecordingKernel(), []
    attention = network.decoder.layers[0].attention
    attention.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0]))
    network(some_tokens(1, LENGTH), kernel=kernel)
    return kernel, attention, inputs[0]


def projected(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (1, N or K, T, H), computed by hand."""
    parts = (x @ linear.weight.T + linear.bias for linear in (attention.query, attention.key, attention.value))
    return tuple(part.view(1, LENGTH, -1, HEAD).transpose(1, 2) for part in parts)


def rotated(x: Tensor) -> Tensor:
    return make_rotation(Rope(), torch.arange(LENGTH)[None], HEAD, x.dtype).rotate(x)


def test_merge_heads_inverts_split_heads():
    x = torch.arange(2 * 3 * 8).view(2, 3, 8)
    assert torch.equal(merge_heads(split_heads(x, 4)), x)
    assert torch.equal(split_heads(x, 4)[1, 2, 0], x[1, 0, 4:6])


def test_default_projections_and_scale():
    kernel, attention, x = kernel_inputs()
    for found, expected in zip(
        (kernel.queries[0], kernel.keys[0], kernel.values[0]), projected(attention, x), strict=True
    ):
        assert_close(found, expected)
    assert kernel.scorings[0].scale == HEAD**-0.5
    assert kernel.scorings[0].softcap is kernel.scorings[0].bias is kernel.scorings[0].temperature is None
    assert kernel.scorings[0].dropout == 0.0


def test_scale_and_softcap_are_passed_to_the_kernel():
    kernel, _, _ = kernel_inputs(scale=0.3, softcap=5.0)
    assert (kernel.scorings[0].scale, kernel.scorings[0].softcap) == (0.3, 5.0)


def test_clip_clamps_queries_keys_and_values():
    kernel, attention, x = kernel_inputs(clip=0.2)
    for found, plain in zip(
        (kernel.queries[0], kernel.keys[0], kernel.values[0]), projected(attention, x), strict=True
    ):
        assert plain.abs().max() > 0.2
        assert_close(found, plain.clamp(-0.2, 0.2))


def test_head_norm_is_applied_before_the_rotation():
    kernel, attention, x = kernel_inputs(position=Rope(), head_norm=HeadNorm(norm=RmsNorm(epsilon=1e-2)))
    q, k, v = projected(attention, x)
    assert_close(kernel.queries[0], rotated(rms_norm(q, (HEAD,), attention.query_norm.weight, eps=1e-2)))
    assert_close(kernel.keys[0], rotated(rms_norm(k, (HEAD,), attention.key_norm.weight, eps=1e-2)))
    assert_close(kernel.values[0], v)
    after = rms_norm(rotated(q), (HEAD,), attention.query_norm.weight, eps=1e-2)
    assert (kernel.queries[0] - after).abs().max() > 1e-2


def test_rotated_head_norm_is_applied_after_the_rotation_and_has_no_weight():
    kernel, attention, x = kernel_inputs(position=Rope(), head_norm=RotatedHeadNorm(epsilon=1e-2))
    q, k, v = projected(attention, x)
    assert_close(kernel.queries[0], rms_norm(rotated(q), (HEAD,), eps=1e-2))
    assert_close(kernel.keys[0], rms_norm(rotated(k), (HEAD,), eps=1e-2))
    assert_close(kernel.values[0], v)
    assert not [name for name, _ in attention.named_parameters() if "norm" in name]


def test_query_temperature_grows_in_steps():
    kernel, attention, x = kernel_inputs(temperature=QueryTemperature(floor=2, scale=0.5))
    growth = [1 + 0.5 * math.log(1 + (index + 1) // 2) for index in range(LENGTH)]
    assert growth[0] == 1.0
    q, k, _ = projected(attention, x)
    assert_close(kernel.queries[0], q * torch.tensor(growth, dtype=torch.float64)[:, None])
    assert_close(kernel.keys[0], k)


def test_score_temperature_grows_beyond_its_length():
    kernel, _, _ = kernel_inputs(temperature=ScoreTemperature(length=3))
    expected = [1.0] * 4 + [math.log2(4) / math.log2(3), math.log2(5) / math.log2(3)]
    assert_close(kernel.scorings[0].temperature.flatten(), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("query", "key"), [(0, 0), (5, 0), (4, 3), (2, 2)])
def test_transformer_xl_scores_by_hand(query, key):
    """((q_i + u)·k_j + (q_i + v)·W_r R(i - j)) · scale, for every head."""
    kernel, attention, x = kernel_inputs(position=RelativeSinusoid())
    q, k, _ = projected(attention, x)
    term = attention.relative
    distance = sinusoids(torch.tensor([query - key]), WIDTH, SinusoidalPositions(layout="halves"), torch.float64)
    r = (distance @ term.projection.weight.T).view(HEADS, HEAD)
    for head in range(HEADS):
        with_content = q[0, head, query] + term.content_bias[head]
        with_distance = q[0, head, query] + term.distance_bias[head]
        expected = (with_content @ k[0, head // 2, key] + with_distance @ r[head]) * HEAD**-0.5
        assert_close(kernel.steps[0].scores[0, head, query, key], expected)


@pytest.mark.parametrize("absorb", [False, True])
@pytest.mark.parametrize("query_rank", [None, 6])
def test_latent_attention_by_hand(query_rank, absorb):
    """DeepSeek-V2, §2.1, head by head: scores [p | r]·[U c | key] / √(plain width + rotary width)."""
    config = replace(decoder(), decoder=stack(latent(query_rank=query_rank)))
    network, calls = toy(config), []
    attention = network.decoder.layers[0].attention
    attention.register_forward_hook(lambda module, arguments, output: calls.append((arguments[0], output)))
    network(some_tokens(1, LENGTH), absorb=absorb)
    x, output = calls[0][0][0], calls[0][1][0]
    rank, plain, rotary, value = 5, 4, 2, 3
    if query_rank is None:
        q = x @ attention.query.weight.T
    else:
        low = rms_norm(x @ attention.query_down.weight.T, (query_rank,), attention.query_norm.weight, eps=1e-6)
        q = low @ attention.query_up.weight.T
    latent_and_key = x @ attention.latent.weight.T
    c = rms_norm(latent_and_key[:, :rank], (rank,), attention.latent_norm.weight, eps=1e-6)
    rotate = make_rotation(Rope(pairing="interleaved"), torch.arange(LENGTH)[None], rotary, x.dtype).rotate
    key = rotate(latent_and_key[None, None, :, rank:])[0, 0]
    heads = []
    for p_and_r, unfold in zip(q.chunk(HEADS, dim=1), attention.unfold.weight.chunk(HEADS), strict=True):
        p, r = p_and_r[:, :plain], rotate(p_and_r[None, None, :, plain:])[0, 0]
        scores = (p @ (c @ unfold[:plain].T).T + r @ key.T) / math.sqrt(plain + rotary)
        weights = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf).softmax(dim=-1)
        heads.append(weights @ (c @ unfold[plain:].T))
    assert heads[0].shape == (LENGTH, value)
    assert_close(output, torch.cat(heads, dim=1) @ attention.output.weight.T)
