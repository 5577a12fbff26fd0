"""Toy networks for tests: small configs, and weights that all have an effect of order one.

network = toy(decoder(position=Rope()))   # in float64, so that equal means equal to twelve digits
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.architecture import (
    Alibi,
    Bidirectional,
    Causal,
    Embedding,
    FeedForward,
    GroupedAttention,
    Head,
    LatentAttention,
    Layer,
    LearnedPositions,
    ModelConfig,
    NoPosition,
    RelativeBuckets,
    RelativeSinusoid,
    RmsNorm,
    Rope,
    SinusoidalPositions,
    Stack,
)
from clearhead.architecture.positions import Position
from clearhead.model.attend import AttentionKernel, AttentionSteps, Scoring, attention_steps
from clearhead.model.context import AttentionContext
from clearhead.model.masks import Mask
from clearhead.model.transformer import Transformer

AnyPosition = Position | LearnedPositions | SinusoidalPositions
VOCAB, WIDTH, CONTEXT = 29, 16, 32
NORM = RmsNorm(epsilon=1e-5)
NO_POSITION = NoPosition()
FEED_FORWARD = FeedForward(width=24, activation="gelu", bias=True)
POSITIONS: dict[str, AnyPosition] = {
    "rope": Rope(),
    "rope interleaved": Rope(pairing="interleaved", width=2),
    "alibi": Alibi(),
    "buckets": RelativeBuckets(num_buckets=8, max_distance=16),
    "transformer-xl": RelativeSinusoid(),
    "learned": LearnedPositions(num_positions=CONTEXT),
    "sinusoidal": SinusoidalPositions(),
}


def grouped(**changes: Any) -> GroupedAttention:
    """Return a grouped-query attention config with 4 query and 2 key-value heads."""
    return GroupedAttention(**({"num_heads": 4, "num_kv_heads": 2, "head_width": 4, "input_bias": True} | changes))


def latent(**changes: Any) -> LatentAttention:
    """Return a latent attention config."""
    sizes = {"query_rank": 6, "latent_rank": 5, "plain_width": 4, "rotary_width": 2, "value_width": 3}
    return LatentAttention(**({"num_heads": 4, "rope": Rope(pairing="interleaved")} | sizes | changes))


def layer(attention: GroupedAttention | LatentAttention, **changes: Any) -> Layer:
    """Return a pre-norm layer config."""
    return Layer(**({"attention": attention, "feed_forward": FEED_FORWARD, "norm": NORM} | changes))


def stack(attention: GroupedAttention | LatentAttention, embedding: Embedding | None = None, **changes: Any) -> Stack:
    """Return a stack config with two equal layers."""
    return Stack(
        embedding=embedding or Embedding(vocab_size=VOCAB), layers=(layer(attention, **changes),) * 2, final_norm=NORM
    )


def stack_with_position(position: AnyPosition, **changes: Any) -> Stack:
    """Return a stack config with this position encoding, in the embedding or in attention."""
    if isinstance(position, LearnedPositions | SinusoidalPositions):
        return stack(grouped(**changes), Embedding(vocab_size=VOCAB, positions=position))
    return stack(grouped(position=position, **changes))


def decoder(position: AnyPosition = NO_POSITION, **changes: Any) -> ModelConfig:
    """Return a decoder-only config. The changes are of its attention."""
    return ModelConfig(width=WIDTH, context=CONTEXT, decoder=stack_with_position(position, **changes), head=Head())


def encoder(position: AnyPosition = NO_POSITION, **changes: Any) -> ModelConfig:
    """Return an encoder-only config without a head. The changes are of its attention."""
    return ModelConfig(
        width=WIDTH, context=CONTEXT, encoder=stack_with_position(position, pattern=Bidirectional(), **changes)
    )


def translator(**changes: Any) -> ModelConfig:
    """Return an encoder-decoder config. The changes are of the ModelConfig."""
    embedding = Embedding(vocab_size=VOCAB, positions=SinusoidalPositions())
    bidirectional = grouped(pattern=Bidirectional())
    source = stack(bidirectional, embedding)
    target = stack(grouped(pattern=Causal()), embedding, cross_attention=bidirectional)
    config = ModelConfig(width=WIDTH, context=CONTEXT, encoder=source, decoder=target, head=Head())
    return replace(config, **changes)


def toy(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Transformer:
    """Return a network in eval mode with weights from `redraw`."""
    network = Transformer(config).eval()
    redraw(network)
    return network.to(dtype)


@torch.no_grad()
def redraw(module: nn.Module) -> None:
    """Draw all parameters from a fixed seed.

    Matrices preserve the magnitude of their input, and norms and biases differ from their initial values.
    """
    generator = torch.Generator().manual_seed(0)
    for name, parameter in sorted(module.named_parameters()):
        draw = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2:
            parameter.copy_(draw * parameter.shape[-1] ** -0.5)
        else:
            parameter.copy_(0.3 * draw + float(name.endswith("weight")))


def some_tokens(batch: int = 2, length: int = 8, seed: int = 1) -> Tensor:
    """Return random token ids (batch, length)."""
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def attention_context(mask: Mask, kernel: AttentionKernel, length: int) -> AttentionContext:
    """Return the context of an attention layer without positions."""
    return AttentionContext(mask=mask, kernel=kernel, query_index=torch.arange(length)[None])


class RecordingKernel:
    """The reference kernel, recording the inputs and results of every call."""

    def __init__(self) -> None:
        self.queries: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.scorings: list[Scoring] = []
        self.steps: list[AttentionSteps] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        result = attention_steps(q, k, v, scoring)
        for record, item in zip(vars(self).values(), (q, k, v, scoring, result), strict=True):
            record.append(item)
        return result.output


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    """Raise AssertionError unless the tensors agree within an absolute and relative tolerance."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
