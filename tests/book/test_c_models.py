"""Statement C5 of the book: every model of its table, as a config at full size and as a network at toy size."""

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
from tests.model.toys import VOCAB, assert_close, some_tokens, toy
from tests.toy_presets import shrink

LEARNED, SINUSOIDAL, RELATIVE = "learned absolute", "sinusoidal absolute", "learned relative"
ROPE, DECOUPLED, INTERLEAVED = "RoPE", "decoupled RoPE", "iRoPE"
UNROTATED, ROTATED = (GroupedAttention, NoPosition), (GroupedAttention, Rope)
SCHEMES = {
    (LearnedPositions, frozenset({UNROTATED})): LEARNED,
    (SinusoidalPositions, frozenset({UNROTATED})): SINUSOIDAL,
    (NoneType, frozenset({(GroupedAttention, RelativeSinusoid)})): RELATIVE,
    (NoneType, frozenset({ROTATED})): ROPE,
    (NoneType, frozenset({(LatentAttention, Rope)})): DECOUPLED,
    (NoneType, frozenset({ROTATED, UNROTATED})): INTERLEAVED,
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


def position_scheme(config: ModelConfig) -> str:
    """Return the position encoding of a config, in the words of the table."""
    stack = config.output_stack
    in_embedding = type(stack.embedding.positions)
    in_attention = {(type(layer.attention), type(layer.attention.position)) for layer in stack.layers}
    return SCHEMES[in_embedding, frozenset(in_attention)]


@pytest.mark.parametrize("name", MODEL_TABLE)
def test_c5_every_model_of_the_table_is_a_preset_with_its_position_encoding(name):
    assert name in presets()
    assert position_scheme(preset(name)) == MODEL_TABLE[name]
    assert position_scheme(shrink(preset(name))) == MODEL_TABLE[name]


@pytest.mark.parametrize("name", MODEL_TABLE)
def test_c5_every_model_of_the_table_runs_and_gets_gradients(name):
    config = shrink(preset(name))
    network, tokens = toy(config), some_tokens(2, 10)
    inputs = (some_tokens(2, 6), tokens) if config.is_encoder_decoder else (tokens,)
    logits = network(*inputs)
    assert logits.shape == (2, 10, VOCAB)
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % VOCAB
    assert_close(network(*inputs[:-1], changed)[:, :6], logits[:, :6])
    functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    without_gradient = [name for name, parameter in network.named_parameters() if parameter.grad is None]
    assert not without_gradient
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())


@pytest.mark.parametrize("name", MODEL_TABLE)
def test_c5_dense_feed_forward_layers_are_two_to_eight_times_as_wide_as_the_model(name):
    """This is the range of C1. Experts are narrower by design."""
    config = preset(name)
    for layer in config.output_stack.layers:
        if isinstance(layer.feed_forward, FeedForward):
            assert 2 <= layer.feed_forward.width / config.width <= 8


def test_c5_the_embedding_scale_is_1_or_root_d():
    for name in MODEL_TABLE:
        config = preset(name)
        assert config.output_stack.embedding.scale in (1.0, pytest.approx(math.sqrt(config.width)))
