"""PaLM: attention and feed-forward in parallel, one key-value head, SwiGLU, no biases.

Chowdhery et al. 2022, §2 and Table 1: layer norm without bias, head width 256, a tied head scaled by width^-0.5, 256k
tokens; initial embeddings from N(0, 1) and matrices from N(0, 1/columns). Not published and chosen here: ε of T5X,
rotary pairs in halves with θ = 10000.
"""

from clearhead.architecture import (
    Embedding,
    FanInInitial,
    FeedForward,
    GroupedAttention,
    Head,
    Layer,
    LayerNorm,
    ModelConfig,
    Rope,
    Stack,
)
from clearhead.families.family import Family, Preset


def palm_config(
    *,
    width: int,
    num_layers: int,
    num_heads: int,
    head_width: int = 256,
    vocab_size: int = 256000,
    epsilon: float = 1e-6,
) -> ModelConfig:
    """Return a config; the feed-forward is four times as wide as the model."""
    norm = LayerNorm(epsilon=epsilon, bias=False)
    layer = Layer(
        attention=GroupedAttention(num_heads=num_heads, num_kv_heads=1, head_width=head_width, position=Rope()),
        feed_forward=FeedForward(width=4 * width, activation="silu", gated=True),
        norm=norm,
        placement="parallel",
    )
    stack = Stack(embedding=Embedding(vocab_size=vocab_size), layers=(layer,) * num_layers, final_norm=norm)
    head = Head(scale=width**-0.5)
    return ModelConfig(width=width, context=2048, decoder=stack, head=head, initial=FanInInitial())


def _palm_preset(width: int, num_layers: int, num_heads: int) -> Preset:
    return lambda: palm_config(width=width, num_layers=num_layers, num_heads=num_heads)


PRESETS = {
    "palm-8b": _palm_preset(4096, 32, 16),
    "palm-62b": _palm_preset(8192, 64, 32),
    "palm-540b": _palm_preset(18432, 118, 48),
}

FAMILY = Family(name="palm", presets=PRESETS)
