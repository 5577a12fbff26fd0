"""Configs of released models at toy size keep every choice and differ in sizes only."""

import math
from dataclasses import replace

import pytest
import torch

from clearhead.api import create
from clearhead.architecture import GroupedAttention, LongRopeScaling, ModelConfig, Rope
from clearhead.errors import ClearheadError
from clearhead.families import TinySizes, family_for, preset, presets, shrink


def kinds(config: ModelConfig) -> list[tuple[type, ...]]:
    """Return the types of all parts of the layers."""
    return [
        tuple(type(part) for part in (*vars(layer).values(), layer.attention.pattern, layer.attention.position))
        for stack in (config.encoder, config.decoder)
        if stack is not None
        for layer in stack.layers[:8]
    ]


@pytest.mark.parametrize("name", presets())
def test_every_preset_shrinks_and_keeps_its_choices(name):
    config = preset(name)
    small = shrink(config)
    assert (small.width, small.context, small.vocab_size) == (64, 128, 257)
    assert kinds(small) == kinds(config)
    for stack in (small.encoder, small.decoder):
        assert stack is None or len(stack.layers) <= 8


def test_scales_that_follow_from_the_width_follow_the_new_width():
    assert shrink(preset("palm-540b")).head.scale == 64**-0.5
    assert shrink(preset("gemma-3-1b")).decoder.embedding.scale == math.sqrt(64)
    assert shrink(preset("gpt2")).head.scale == 1.0


def test_partial_and_long_ropes_fit_narrow_heads():
    scaling = LongRopeScaling(
        short_factors=(1.0,) * 16, long_factors=(2.0,) * 16, original_context=64, attention_factor=1.0
    )
    for rope, expected in (
        (Rope(width=32), Rope(width=8)),
        (
            Rope(width=32, scaling=scaling),
            Rope(width=8, scaling=replace(scaling, short_factors=(1.0,) * 4, long_factors=(2.0,) * 4)),
        ),
    ):
        config = preset("llama-7b")
        attention = GroupedAttention(num_heads=32, num_kv_heads=32, head_width=64, position=rope)
        layer = replace(config.decoder.layers[0], attention=attention)
        config = replace(config, decoder=replace(config.decoder, layers=(layer,)))
        assert shrink(config).decoder.layers[0].attention.position == expected


def test_create_makes_a_tiny_model():
    model = create("deepseek-v3", tiny=True, seed=3)
    assert model.config == shrink(preset("deepseek-v3"))
    assert torch.equal(model.network.token_table, create(shrink(preset("deepseek-v3")), seed=3).network.token_table)


def test_sizes_can_be_chosen():
    sizes = TinySizes(
        vocab_size=29, width=16, context=32, head_width=4, feed_forward=24, expert=24, window=3, max_layers=2
    )
    config = shrink(preset("mistral-7b"), sizes)
    assert (config.width, config.vocab_size, len(config.decoder.layers)) == (16, 29, 2)
    assert config.decoder.layers[0].attention.pattern.size == 3


@pytest.mark.parametrize("name", presets())
def test_a_tiny_model_can_be_saved_wherever_the_released_one_can(name):
    def family_name(config: ModelConfig) -> str | None:
        try:
            return family_for(config).name
        except ClearheadError:
            return None

    released, small = family_name(preset(name)), family_name(shrink(preset(name)))
    assert (released is None) == (small is None)


def test_score_scales_that_follow_from_the_head_width_follow_the_new_width():
    scales = {
        name: shrink(preset(name)).output_stack.layers[0].attention.scale
        for name in ("gemma-3-1b", "deberta-v3-small", "gpt-neo-125m")
    }
    assert scales == {"gemma-3-1b": 16**-0.5, "deberta-v3-small": pytest.approx(48**-0.5), "gpt-neo-125m": 1.0}
