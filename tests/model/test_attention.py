"""What an attention does to queries and keys before the kernel, each option against its formula written out."""

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
from tests.model.toys import WIDTH, Spy, close, decoder, latent, some_tokens, stack, toy

LENGTH, HEADS, HEAD = 6, 4, 4


def seen_by_the_kernel(**changes: Any) -> tuple[Spy, Attention, Tensor]:
    """The first layer of a toy decoder: what its kernel was given, the module, and its input."""
    network, spy, inputs = toy(decoder(**changes)), Spy(), []
    attention = network.decoder.layers[0].attention
    attention.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    network(some_tokens(1, LENGTH), kernel=spy)
    return spy, attention, inputs[0]


def projected(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values by hand: (1, N or K, T, H)."""
    parts = (x @ linear.weight.T + linear.bias for linear in (attention.query, attention.key, attention.value))
    return tuple(part.view(1, LENGTH, -1, HEAD).transpose(1, 2) for part in parts)


def turned(x: Tensor) -> Tensor:
    return make_rotation(Rope(), torch.arange(LENGTH)[None], HEAD, x.dtype).rotate(x)


def test_heads_are_split_and_merged_in_order():
    x = torch.arange(2 * 3 * 8).view(2, 3, 8)
    assert torch.equal(merge_heads(split_heads(x, 4)), x)
    assert torch.equal(split_heads(x, 4)[1, 2, 0], x[1, 0, 4:6])


def test_plain_projections_and_scale():
    spy, attention, x = seen_by_the_kernel()
    for found, expected in zip((spy.queries[0], spy.keys[0], spy.values[0]), projected(attention, x), strict=True):
        close(found, expected)
    assert spy.how[0].scale == HEAD**-0.5
    assert spy.how[0].softcap is spy.how[0].bias is spy.how[0].temperature is None
    assert spy.how[0].dropout == 0.0


def test_scale_and_softcap_go_to_the_kernel():
    spy, _, _ = seen_by_the_kernel(scale=0.3, softcap=5.0)
    assert (spy.how[0].scale, spy.how[0].softcap) == (0.3, 5.0)


def test_clip_holds_queries_keys_and_values():
    spy, attention, x = seen_by_the_kernel(clip=0.2)
    for found, plain in zip((spy.queries[0], spy.keys[0], spy.values[0]), projected(attention, x), strict=True):
        assert plain.abs().max() > 0.2
        close(found, plain.clamp(-0.2, 0.2))


def test_head_norm_stands_before_the_rotation():
    spy, attention, x = seen_by_the_kernel(position=Rope(), head_norm=HeadNorm(norm=RmsNorm(epsilon=1e-2)))
    q, k, v = projected(attention, x)
    close(spy.queries[0], turned(rms_norm(q, (HEAD,), attention.query_norm.weight, eps=1e-2)))
    close(spy.keys[0], turned(rms_norm(k, (HEAD,), attention.key_norm.weight, eps=1e-2)))
    close(spy.values[0], v)
    after = rms_norm(turned(q), (HEAD,), attention.query_norm.weight, eps=1e-2)
    assert (spy.queries[0] - after).abs().max() > 1e-2


def test_rotated_head_norm_stands_after_the_rotation_and_has_no_weight():
    spy, attention, x = seen_by_the_kernel(position=Rope(), head_norm=RotatedHeadNorm(epsilon=1e-2))
    q, k, v = projected(attention, x)
    close(spy.queries[0], rms_norm(turned(q), (HEAD,), eps=1e-2))
    close(spy.keys[0], rms_norm(turned(k), (HEAD,), eps=1e-2))
    close(spy.values[0], v)
    assert not [name for name, _ in attention.named_parameters() if "norm" in name]


def test_query_temperature_grows_in_steps():
    spy, attention, x = seen_by_the_kernel(temperature=QueryTemperature(floor=2, scale=0.5))
    growth = [1 + 0.5 * math.log(1 + (index + 1) // 2) for index in range(LENGTH)]
    assert growth[0] == 1.0
    q, k, _ = projected(attention, x)
    close(spy.queries[0], q * torch.tensor(growth, dtype=torch.float64)[:, None])
    close(spy.keys[0], k)


def test_score_temperature_grows_beyond_its_length():
    spy, _, _ = seen_by_the_kernel(temperature=ScoreTemperature(length=3))
    expected = [1.0] * 4 + [math.log2(4) / math.log2(3), math.log2(5) / math.log2(3)]
    close(spy.how[0].temperature.flatten(), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("query", "key"), [(0, 0), (5, 0), (4, 3), (2, 2)])
def test_transformer_xl_scores_by_hand(query, key):
    """((q_i + u)·k_j + (q_i + v)·W_r R(i - j)) · scale, for every head."""
    spy, attention, x = seen_by_the_kernel(position=RelativeSinusoid())
    q, k, _ = projected(attention, x)
    term = attention.relative
    distance = sinusoids(torch.tensor([query - key]), WIDTH, SinusoidalPositions(layout="halves"), torch.float64)
    r = (distance @ term.projection.weight.T).view(HEADS, HEAD)
    for head in range(HEADS):
        with_content = q[0, head, query] + term.content_bias[head]
        with_distance = q[0, head, query] + term.distance_bias[head]
        expected = (with_content @ k[0, head // 2, key] + with_distance @ r[head]) * HEAD**-0.5
        close(spy.attended[0].scores[0, head, query, key], expected)


@pytest.mark.parametrize("absorb", [False, True])
@pytest.mark.parametrize("query_rank", [None, 6])
def test_latent_attention_by_hand(query_rank, absorb):
    """DeepSeek-V2, §2.1, head by head: scores [p | r]·[U c | key] over the root of both widths together."""
    config = replace(decoder(), decoder=stack(latent(query_rank=query_rank)))
    network, calls = toy(config), []
    attention = network.decoder.layers[0].attention
    attention.register_forward_hook(lambda module, given, output: calls.append((given[0], output)))
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
    turn = make_rotation(Rope(pairing="interleaved"), torch.arange(LENGTH)[None], rotary, x.dtype).rotate
    key = turn(latent_and_key[None, None, :, rank:])[0, 0]
    heads = []
    for p_and_r, unfold in zip(q.chunk(HEADS, dim=1), attention.unfold.weight.chunk(HEADS), strict=True):
        p, r = p_and_r[:, :plain], turn(p_and_r[None, None, :, plain:])[0, 0]
        scores = (p @ (c @ unfold[:plain].T).T + r @ key.T) / math.sqrt(plain + rotary)
        weights = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf).softmax(dim=-1)
        heads.append(weights @ (c @ unfold[plain:].T))
    assert heads[0].shape == (LENGTH, value)
    close(output, torch.cat(heads, dim=1) @ attention.output.weight.T)
