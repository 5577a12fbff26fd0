"""Gopher: the design of GPT-2 with RMS norms and the relative positions of Transformer-XL.

Sizes, vocabulary and context: Rae et al. 2021, §3.1 and Table 1. The parameter counts there imply a tied head, an
ungated feed-forward of 4 · width and one W_r per layer. Not published and chosen here: no biases, the tanh form of
GELU as in GPT-2 and JAX, ε of Haiku's RMSNorm, u and v per layer.
"""

from clearhead.architecture import (
    Embedding,
    FeedForward,
    GroupedAttention,
    Head,
    Layer,
    ModelConfig,
    RelativeSinusoid,
    RmsNorm,
    Stack,
)
from clearhead.families.family import Family, Preset


def gopher_config(
    *, width: int, num_layers: int, num_heads: int, head_width: int, vocab_size: int = 32000, epsilon: float = 1e-5
) -> ModelConfig:
    """Return a config; heads may have another width than width / num_heads."""
    norm = RmsNorm(epsilon=epsilon)
    layer = Layer(
        attention=GroupedAttention(
            num_heads=num_heads, num_kv_heads=num_heads, head_width=head_width, position=RelativeSinusoid()
        ),
        feed_forward=FeedForward(width=4 * width, activation="gelu_tanh"),
        norm=norm,
    )
    stack = Stack(embedding=Embedding(vocab_size=vocab_size), layers=(layer,) * num_layers, final_norm=norm)
    return ModelConfig(width=width, context=2048, decoder=stack, head=Head())


def _gopher_preset(width: int, num_layers: int, num_heads: int, head_width: int) -> Preset:
    return lambda: gopher_config(width=width, num_layers=num_layers, num_heads=num_heads, head_width=head_width)


PRESETS = {
    "gopher-44m": _gopher_preset(512, 8, 16, 32),
    "gopher-117m": _gopher_preset(768, 12, 12, 64),
    "gopher-417m": _gopher_preset(1536, 12, 12, 128),
    "gopher-1.4b": _gopher_preset(2048, 24, 16, 128),
    "gopher-7.1b": _gopher_preset(4096, 32, 32, 128),
    "gopher-280b": _gopher_preset(16384, 80, 128, 128),
}

FAMILY = Family(name="gopher", presets=PRESETS)
