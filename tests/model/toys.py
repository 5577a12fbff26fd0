"""Toy networks for the tests of the model room: a few lines each, every weight with an effect of order one.

network = toy(decoder(position=Rope()))   # float64: equal means equal to twelve digits
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
    Position,
    RelativeBuckets,
    RelativeSinusoid,
    RmsNorm,
    Rope,
    SinusoidalPositions,
    Stack,
)
from clearhead.model.attend import AttentionKernel, AttentionSteps, Scoring, attention_steps
from clearhead.model.context import AttentionContext
from clearhead.model.masks import Mask
from clearhead.model.transformer import Transformer

AnyPosition = Position | LearnedPositions | SinusoidalPositions
VOCAB, WIDTH, CONTEXT = 29, 16, 32
NORM = RmsNorm(epsilon=1e-5)
NOWHERE = NoPosition()
INNER = FeedForward(width=24, activation="gelu", bias=True)
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
    return GroupedAttention(**({"num_heads": 4, "num_kv_heads": 2, "head_width": 4, "input_bias": True} | changes))


def latent(**changes: Any) -> LatentAttention:
    sizes = {"query_rank": 6, "latent_rank": 5, "plain_width": 4, "rotary_width": 2, "value_width": 3}
    return LatentAttention(**({"num_heads": 4, "rope": Rope(pairing="interleaved")} | sizes | changes))


def layer(attention: GroupedAttention | LatentAttention, **changes: Any) -> Layer:
    return Layer(**({"attention": attention, "feed_forward": INNER, "norm": NORM} | changes))


def stack(attention: GroupedAttention | LatentAttention, embedding: Embedding | None = None, **changes: Any) -> Stack:
    return Stack(
        embedding=embedding or Embedding(vocab_size=VOCAB), layers=(layer(attention, **changes),) * 2, final_norm=NORM
    )


def placed(position: AnyPosition, **changes: Any) -> Stack:
    """A stack whose positions enter where this scheme has them enter."""
    if isinstance(position, LearnedPositions | SinusoidalPositions):
        return stack(grouped(**changes), Embedding(vocab_size=VOCAB, positions=position))
    return stack(grouped(position=position, **changes))


def decoder(position: AnyPosition = NOWHERE, **changes: Any) -> ModelConfig:
    return ModelConfig(width=WIDTH, context=CONTEXT, decoder=placed(position, **changes), head=Head())


def encoder(position: AnyPosition = NOWHERE, **changes: Any) -> ModelConfig:
    return ModelConfig(width=WIDTH, context=CONTEXT, encoder=placed(position, pattern=Bidirectional(), **changes))


def translator(**changes: Any) -> ModelConfig:
    sinusoidal = Embedding(vocab_size=VOCAB, positions=SinusoidalPositions())
    across = grouped(pattern=Bidirectional())
    source = stack(across, sinusoidal)
    target = stack(grouped(pattern=Causal()), sinusoidal, cross_attention=across)
    whole = ModelConfig(width=WIDTH, context=CONTEXT, encoder=source, decoder=target, head=Head())
    return replace(whole, **changes)


def toy(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Transformer:
    network = Transformer(config).eval()
    redraw(network)
    return network.to(dtype)


@torch.no_grad()
def redraw(module: nn.Module) -> None:
    """Matrices keep the size of what they multiply; norms and biases leave their starting values."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in sorted(module.named_parameters()):
        draw = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2:
            parameter.copy_(draw * parameter.shape[-1] ** -0.5)
        else:
            parameter.copy_(0.3 * draw + float(name.endswith("weight")))


def some_tokens(batch: int = 2, length: int = 8, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def context_of(mask: Mask, kernel: AttentionKernel, length: int) -> AttentionContext:
    return AttentionContext(mask=mask, kernel=kernel, query_index=torch.arange(length)[None])


class Spy:
    """A kernel that computes as the reference does and keeps what each layer gave it."""

    def __init__(self) -> None:
        self.queries: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.how: list[Scoring] = []
        self.attended: list[AttentionSteps] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> Tensor:
        result = attention_steps(q, k, v, how)
        for kept, item in zip(vars(self).values(), (q, k, v, how, result), strict=True):
            kept.append(item)
        return result.output


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
