"""Part B of the book, positions, statement by statement: B3 to B5, relative positions, no positions, word order."""

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
from tests.book.golden import golden, golden_value
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
def test_b3_the_bias_of_relative_positions_depends_on_the_distance_only(position):
    """With one repeated token all queries are equal, so that scores can differ by distance only."""
    network, kernel = toy(decoder(position)), RecordingKernel()
    network(torch.full((1, 12), 3), kernel=kernel)
    bias = kernel.scorings[0].bias[0]
    assert bias.shape == (4, 12, 12)
    assert is_toeplitz(bias)
    last_query = bias[:, -1]
    assert (last_query.diff(dim=-1).abs().amax(dim=-1) > 1e-4).all()


def test_b3_scores_with_learned_absolute_positions_depend_on_more_than_the_distance():
    network, kernel = toy(decoder(LearnedPositions(num_positions=CONTEXT))), RecordingKernel()
    network(torch.full((1, 12), 3), kernel=kernel)
    assert not is_toeplitz(kernel.steps[0].scores[0])


def test_b3_relative_terms_and_bucket_tables_are_learned_and_alibi_has_no_parameters():
    for position, names in (
        (RelativeSinusoid(), ["projection.weight", "content_bias", "distance_bias"]),
        (RelativeBuckets(num_buckets=8, max_distance=16), ["relative_bias.weight"]),
        (Alibi(), []),
    ):
        network = toy(decoder(position))
        network(some_tokens()).square().sum().backward()
        parameters = {n: p for n, p in network.named_parameters() if "relative" in n}
        assert sorted({name.split("relative.")[-1].removeprefix("decoder.") for name in parameters}) == sorted(names)
        assert all(parameter.grad.abs().max() > 0 for parameter in parameters.values())


# --- B4


@pytest.mark.parametrize("seed", range(3))
def test_b4_a_causal_head_without_positions_computes_one_over_t(seed):
    """Column 1 is 1 for all tokens, column 2 for the first only. Keys are column 1, values are column 2."""
    num_tokens, width = golden_value("nope", "tokens"), 4
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


def decoder_with_positions(*positions: Rope | NoPosition) -> ModelConfig:
    """Return a decoder config with one layer per position encoding."""
    config = decoder()
    layers = tuple(layer(grouped(position=position)) for position in positions)
    return replace(config, decoder=replace(config.decoder, layers=layers))


def test_b4_a_network_without_positions_ignores_position_ids():
    network, tokens = toy(decoder(NoPosition())), some_tokens()
    assert torch.equal(network(tokens, position_ids=5 * torch.arange(8)[None]), network(tokens))
    assert (
        network(tokens.flip(1)).flip(1) - network(tokens)
    ).abs().max() > 0.1  # the causal mask still makes the order matter


def test_b4_layers_with_and_without_rope_can_be_mixed():
    """iRoPE: only layers with a Rope rotate their queries and keys."""
    network, tokens = toy(decoder_with_positions(Rope(), NoPosition(), Rope())), some_tokens(1)
    kernel = RecordingKernel()
    network(tokens, kernel=kernel)
    inputs = []
    for block in network.decoder.layers:
        block.attention.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0]))
    network(tokens)
    for block, x, q, rotates in zip(network.decoder.layers, inputs, kernel.queries, (True, False, True), strict=True):
        unrotated = block.attention.project(block.attention.query, x, block.attention.config.num_heads)
        assert torch.allclose(q, unrotated, rtol=0, atol=1e-12) is not rotates
    assert not torch.allclose(network(tokens, position_ids=3 * torch.arange(8)[None]), network(tokens))


@pytest.mark.parametrize("absorb", [False, True])
def test_b4_decoupled_rope_rotates_only_its_own_entries(absorb):
    """In latent attention the plain entries contain no position, and all heads share one rotated key."""
    config = decoder()
    network = toy(replace(config, decoder=stack(latent())))
    tokens, rotary = some_tokens(1), 2
    unshifted, shifted = RecordingKernel(), RecordingKernel()
    network(tokens, kernel=unshifted, absorb=absorb)
    network(tokens, position_ids=torch.arange(8)[None] + 3, kernel=shifted, absorb=absorb)
    for first, second in ((unshifted.queries[0], shifted.queries[0]), (unshifted.keys[0], shifted.keys[0])):
        assert torch.equal(first[..., :-rotary], second[..., :-rotary])
        assert (first[..., -rotary:] - second[..., -rotary:]).abs().max() > 0.1
    assert torch.equal(unshifted.values[0], shifted.values[0])
    rotated_key = unshifted.keys[0][..., -rotary:]
    assert torch.equal(rotated_key, rotated_key[:, :1].expand_as(rotated_key))


def test_b4_decoupled_rope_depends_on_the_distance_only():
    network = toy(replace(decoder(), decoder=stack(latent())))
    tokens = some_tokens()
    assert_close(network(tokens, position_ids=torch.arange(8)[None] + 50), network(tokens), tolerance=1e-10)


# --- B5

WORDS = {word: number for number, word in enumerate(("I", "feel", "good", "the", "man", "chased", "dog"))}


def sentence_vector(network: Transformer, sentence: str) -> Tensor:
    """Return the mean of the hidden states of a sentence."""
    tokens = torch.tensor([[WORDS[word] for word in sentence.split()]])
    return network(tokens)[0].mean(dim=0)


SENTENCES = [("I feel good", "good feel I"), ("the man chased the dog", "the dog chased the man")]
BIDIRECTIONAL_POSITIONS = POSITIONS | {"buckets": RelativeBuckets(num_buckets=8, max_distance=16, bidirectional=True)}


@pytest.mark.parametrize(("one", "other"), SENTENCES)
def test_b5_without_positions_word_order_is_lost(one, other):
    network = toy(encoder())
    assert_close(sentence_vector(network, one), sentence_vector(network, other))


@pytest.mark.parametrize("position", BIDIRECTIONAL_POSITIONS.values(), ids=BIDIRECTIONAL_POSITIONS.keys())
def test_b5_with_positions_word_order_matters(position):
    network = toy(encoder(position))
    for one, other in SENTENCES[1:] if isinstance(position, Alibi) else SENTENCES:
        assert (sentence_vector(network, one) - sentence_vector(network, other)).abs().max() > 1e-3


def test_b5_alibi_encodes_distance_but_not_direction():
    """An encoder gives a sentence and its reverse the same vector; the causal mask of a decoder distinguishes them."""
    bidirectional, causal = toy(encoder(Alibi())), toy(replace(decoder(Alibi()), head=None))
    assert_close(sentence_vector(bidirectional, "I feel good"), sentence_vector(bidirectional, "good feel I"))
    assert (sentence_vector(causal, "I feel good") - sentence_vector(causal, "good feel I")).abs().max() > 1e-3
