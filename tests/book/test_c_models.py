"""Statement C5 of the book: every row of its model table, at released size as data and at toy size running."""

import math
from types import NoneType

import pytest
from torch.nn import functional

from clearhead.architecture import (
    FeedForward,
    GroupedAttention,
    LatentAttention,
    LearnedPositions,
    ModelConfig,
    NoPosition,
    RelativeSinusoid,
    Rope,
    SinusoidalPositions,
)
from clearhead.families import preset, presets
from tests.book.shrink import shrink
from tests.model.toys import VOCAB, assert_close, some_tokens, toy

LEARNED, SINUSOIDAL, RELATIVE = "learned absolute", "sinusoidal absolute", "learned relative"
ROPE, DECOUPLED, INTERLEAVED = "RoPE", "decoupled RoPE", "iRoPE"
NO_POSITION, TURNED = (GroupedAttention, NoPosition), (GroupedAttention, Rope)
SCHEMES = {
    (LearnedPositions, frozenset({NO_POSITION})): LEARNED,
    (SinusoidalPositions, frozenset({NO_POSITION})): SINUSOIDAL,
    (NoneType, frozenset({(GroupedAttention, RelativeSinusoid)})): RELATIVE,
    (NoneType, frozenset({TURNED})): ROPE,
    (NoneType, frozenset({(LatentAttention, Rope)})): DECOUPLED,
    (NoneType, frozenset({TURNED, NO_POSITION})): INTERLEAVED,
}
MODEL_TABLE = {
    "transformer-base": SINUSOIDAL,
    "gpt1": LEARNED,
    "gpt2": LEARNED,
    "gpt3-175b": LEARNED,
    "gopher-280b": RELATIVE,
    "palm-540b": ROPE,
    "llama-7b": ROPE,
    "llama-2-70b": ROPE,
    "llama-3.1-8b": ROPE,
    "grok-1": ROPE,
    "grok-2": ROPE,
    "deepseek-v2": DECOUPLED,
    "deepseek-v3": DECOUPLED,
    "llama-4-scout": INTERLEAVED,
    "qwen3-0.6b": ROPE,
    "gemma-3-1b": ROPE,
}


def scheme(config: ModelConfig) -> str:
    """How a config tells positions, in the words of the table."""
    stack = config.output_stack
    with_embedding = type(stack.embedding.positions)
    in_attention = {(type(layer.attention), type(layer.attention.position)) for layer in stack.layers}
    return SCHEMES[with_embedding, frozenset(in_attention)]


@pytest.mark.parametrize("name", MODEL_TABLE)
def test_c5_every_row_of_the_model_table_is_a_preset_with_its_positions(name):
    assert name in presets()
    assert scheme(preset(name)) == MODEL_TABLE[name]
    assert scheme(shrink(preset(name))) == MODEL_TABLE[name]


@pytest.mark.parametrize("name", MODEL_TABLE)
def test_c5_every_row_of_the_model_table_runs_and_learns(name):
    config = shrink(preset(name))
    network, tokens = toy(config), some_tokens(2, 10)
    inputs = (some_tokens(2, 6), tokens) if config.is_encoder_decoder else (tokens,)
    logits = network(*inputs)
    assert logits.shape == (2, 10, VOCAB)
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % VOCAB
    assert_close(network(*inputs[:-1], changed)[:, :6], logits[:, :6])
    functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    never_reached = [name for name, parameter in network.named_parameters() if parameter.grad is None]
    assert not never_reached
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())


@pytest.mark.parametrize("name", MODEL_TABLE)
def test_c5_dense_feed_forwards_are_two_to_eight_times_the_width(name):
    """C1's range; experts are narrower on purpose."""
    config = preset(name)
    for one in config.output_stack.layers:
        if isinstance(one.feed_forward, FeedForward):
            assert 2 <= one.feed_forward.width / config.width <= 8


def test_c5_embedding_scale_is_root_d_where_there_is_one():
    for name in MODEL_TABLE:
        config = preset(name)
        assert config.output_stack.embedding.scale in (1.0, pytest.approx(math.sqrt(config.width)))
