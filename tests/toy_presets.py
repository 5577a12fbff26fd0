"""Configs of released models at toy size, with the sizes of tests/model/toys.py.

config = shrink(preset("llama-4-scout"))   # a few layers, all choices kept, all sizes small
"""

from dataclasses import replace

from clearhead.architecture import ModelConfig, Stack
from clearhead.families import TinySizes
from clearhead.families import shrink as shrink_to
from tests.model.toys import CONTEXT, VOCAB, WIDTH

SIZES = TinySizes(vocab_size=VOCAB, width=WIDTH, context=CONTEXT, head_width=4, feed_forward=24, expert=24, window=3)
MIN_LAYERS = 3  # a first, a middle and a last one


def shrink_sizes(config: ModelConfig) -> ModelConfig:
    """Return the config at toy size with its first eight layers, all choices kept."""
    return shrink_to(config, SIZES)


def shrink(config: ModelConfig) -> ModelConfig:
    """Return the config at toy size: the first layers, with one of every kind, all choices kept, all sizes small."""
    small = shrink_sizes(config)
    return replace(
        small,
        encoder=small.encoder and without_repeated_layers(small.encoder),
        decoder=small.decoder and without_repeated_layers(small.decoder),
    )


def without_repeated_layers(stack: Stack) -> Stack:
    """Return the stack up to the first layer of its last kind, but at least MIN_LAYERS layers."""
    last_new = max(stack.layers.index(layer) for layer in stack.layers)
    return replace(stack, layers=stack.layers[: max(MIN_LAYERS, last_new + 1)])
