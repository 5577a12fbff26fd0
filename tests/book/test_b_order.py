"""Part B of the book, positions, statement by statement: B3 to B5, relative, none at all, and word order."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from clearhead.architecture import (
    Alibi,
    GroupedAttention,
    LearnedPositions,
    ModelConfig,
    NoPosition,
    RelativeBuckets,
    RelativeSinusoid,
    Rope,
)
from clearhead.model.attention import Attention
from clearhead.model.masks import Mask
from clearhead.model.transformer import Transformer
from tests.book.golden import golden, plain
from tests.model.toys import (
    CONTEXT,
    POSITIONS,
    RecordingKernel,
    assert_close,
    attention_context,
    decoder,
    encoder,
    grouped,
    latent,
    layer,
    some_tokens,
    stack,
    toy,
)

# --- B3


def is_toeplitz(matrix: Tensor) -> bool:
    return torch.allclose(matrix[..., 1:, 1:], matrix[..., :-1, :-1], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "position",
    [RelativeSinusoid(), RelativeBuckets(num_buckets=8, max_distance=16), Alibi()],
    ids=["learned relative (Gopher)", "buckets (T5)", "alibi"],
)
def test_b3_what_relative_positions_add_to_a_score_depends_on_the_distance_only(position):
    """With one token repeated every query is the same, so only the distance is left to tell scores apart."""
    network, spy = toy(decoder(position)), RecordingKernel()
    network(torch.full((1, 12), 3), kernel=spy)
    bias = spy.scorings[0].bias[0]
    assert bias.shape == (4, 12, 12)
    assert is_toeplitz(bias)
    to_the_last_query = bias[:, -1]
    assert (to_the_last_query.diff(dim=-1).abs().amax(dim=-1) > 1e-4).all()


def test_b3_the_matrix_between_learned_absolute_positions_does_not_depend_on_the_distance_only():
    network, spy = toy(decoder(LearnedPositions(num_positions=CONTEXT))), RecordingKernel()
    network(torch.full((1, 12), 3), kernel=spy)
    assert not is_toeplitz(spy.steps[0].scores[0])


def test_b3_gopher_learns_its_relative_term_and_the_buckets_learn_theirs():
    for position, names in (
        (RelativeSinusoid(), ["projection.weight", "content_bias", "distance_bias"]),
        (RelativeBuckets(num_buckets=8, max_distance=16), ["relative_bias.weight"]),
        (Alibi(), []),
    ):
        network = toy(decoder(position))
        network(some_tokens()).square().sum().backward()
        of_position = {n: p for n, p in network.named_parameters() if "relative" in n}
        assert sorted({name.split("relative.")[-1].removeprefix("decoder.") for name in of_position}) == sorted(names)
        assert all(parameter.grad.abs().max() > 0 for parameter in of_position.values())


# --- B4


@pytest.mark.parametrize("seed", range(3))
def test_b4_a_causal_head_without_positions_computes_one_over_t(seed):
    """Column 1 is 1 for all tokens, column 2 only for the first; keys read column 1, values carry column 2."""
    num_tokens, width = plain("nope", "tokens"), 4
    x = torch.zeros(1, num_tokens, width, dtype=torch.float64)
    x[:, :, 0], x[:, 0, 1] = 1.0, 1.0
    attention = Attention(GroupedAttention(num_heads=1, num_kv_heads=1, head_width=width), width).double()
    with torch.no_grad():
        attention.query.weight.normal_(generator=torch.Generator().manual_seed(seed))  # any query
        for linear in (attention.key, attention.value, attention.output):
            linear.weight.zero_()
        attention.key.weight[:, 0] = 1.0
        attention.value.weight[0, 1] = 1.0
        attention.output.weight.copy_(torch.eye(width))
    output = attention(x, attention_context(Mask(causal=True), RecordingKernel(), num_tokens))[0]
    assert_close(output[:, 0], golden("nope", "expected_first_column"))
    assert not output[:, 1:].any()


def mixed(*positions: Rope | NoPosition) -> ModelConfig:
    config = decoder()
    layers = tuple(layer(grouped(position=position)) for position in positions)
    return replace(config, decoder=replace(config.decoder, layers=layers))


def test_b4_a_network_without_positions_is_told_none():
    network, tokens = toy(decoder(NoPosition())), some_tokens()
    assert torch.equal(network(tokens, position_ids=5 * torch.arange(8)[None]), network(tokens))
    assert (network(tokens.flip(1)).flip(1) - network(tokens)).abs().max() > 0.1  # the mask alone tells the order


def test_b4_rope_and_no_position_mix_layer_by_layer():
    """iRoPE: only the layers that have a Rope turn their queries and keys."""
    network, tokens = toy(mixed(Rope(), NoPosition(), Rope())), some_tokens(1)
    spy = RecordingKernel()
    network(tokens, kernel=spy)
    inputs = []
    for block in network.decoder.layers:
        block.attention.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    network(tokens)
    for block, x, q, turns in zip(network.decoder.layers, inputs, spy.queries, (True, False, True), strict=True):
        unturned = block.attention.project(block.attention.query, x, block.attention.config.num_heads)
        assert torch.allclose(q, unturned, rtol=0, atol=1e-12) is not turns
    assert not torch.allclose(network(tokens, position_ids=3 * torch.arange(8)[None]), network(tokens))


@pytest.mark.parametrize("absorb", [False, True])
def test_b4_decoupled_rope_turns_only_its_own_entries(absorb):
    """Latent attention: the plain entries carry no position; one turned key serves all heads."""
    config = decoder()
    network = toy(replace(config, decoder=stack(latent())))
    tokens, rotary = some_tokens(1), 2
    here, there = RecordingKernel(), RecordingKernel()
    network(tokens, kernel=here, absorb=absorb)
    network(tokens, position_ids=torch.arange(8)[None] + 3, kernel=there, absorb=absorb)
    for first, second in ((here.queries[0], there.queries[0]), (here.keys[0], there.keys[0])):
        assert torch.equal(first[..., :-rotary], second[..., :-rotary])
        assert (first[..., -rotary:] - second[..., -rotary:]).abs().max() > 0.1
    assert torch.equal(here.values[0], there.values[0])
    turned_key = here.keys[0][..., -rotary:]
    assert torch.equal(turned_key, turned_key[:, :1].expand_as(turned_key))


def test_b4_decoupled_rope_tells_the_distance_only():
    network = toy(replace(decoder(), decoder=stack(latent())))
    tokens = some_tokens()
    assert_close(network(tokens, position_ids=torch.arange(8)[None] + 50), network(tokens), tolerance=1e-10)


# --- B5

WORDS = {word: number for number, word in enumerate(("I", "feel", "good", "the", "man", "chased", "dog"))}


def meaning(network: Transformer, sentence: str) -> Tensor:
    """The mean of the hidden states: one vector for the sentence."""
    tokens = torch.tensor([[WORDS[word] for word in sentence.split()]])
    return network(tokens)[0].mean(dim=0)


SENTENCES = [("I feel good", "good feel I"), ("the man chased the dog", "the dog chased the man")]
BOTH_WAYS = POSITIONS | {"buckets": RelativeBuckets(num_buckets=8, max_distance=16, bidirectional=True)}


@pytest.mark.parametrize(("one", "other"), SENTENCES)
def test_b5_without_positions_word_order_is_lost(one, other):
    network = toy(encoder())
    assert_close(meaning(network, one), meaning(network, other))


@pytest.mark.parametrize("position", BOTH_WAYS.values(), ids=BOTH_WAYS.keys())
def test_b5_with_positions_word_order_matters(position):
    network = toy(encoder(position))
    for one, other in SENTENCES[1:] if isinstance(position, Alibi) else SENTENCES:
        assert (meaning(network, one) - meaning(network, other)).abs().max() > 1e-3


def test_b5_alibi_knows_how_far_but_not_which_way():
    """To an encoder a sentence and its mirror are one; the causal mask of a decoder tells them apart."""
    both_ways, causal = toy(encoder(Alibi())), toy(replace(decoder(Alibi()), head=None))
    assert_close(meaning(both_ways, "I feel good"), meaning(both_ways, "good feel I"))
    assert (meaning(causal, "I feel good") - meaning(causal, "good feel I")).abs().max() > 1e-3
