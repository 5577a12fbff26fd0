"""Direct logit attribution: a token's logit as a sum over what each part of the network added to the residual stream.

    for part in attribute_logit(trace, token=42).largest(5): print(part.part, part.layer, part.head, part.logit)

The stream before the final norm is embedding + Σ branches, and the norm is linear once its divisor is held fixed.
Every summand therefore has its own logit, and these add up to the model's (Elhage et al. 2021: direct effects; an
effect through later parts is attributed to those parts). A softcap on the logits is applied after the sum.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from clearhead.errors import ClearheadError
from clearhead.inspection.attention_heads import check_index
from clearhead.inspection.recording import evaluation_mode
from clearhead.inspection.replay import BlockReplay
from clearhead.inspection.trace import Trace
from clearhead.model import DeviationNormLayer, OffsetLayerNorm, RmsNormLayer, Transformer


@dataclass(frozen=True)
class Contribution:
    """What one part of the network adds to a logit."""

    part: str  # embedding, attention, cross_attention, feed_forward; bias: of the final norm and the vocabulary head
    layer: int | None
    logit: float
    head: int | None = None  # None: all heads; if heads have their own contributions, only the biases of the layer


@dataclass(frozen=True)
class Attribution:
    """The contributions of all parts to the logit of one token at one position."""

    token: int
    position: int
    contributions: list[Contribution]

    @property
    def logit(self) -> float:
        """The sum of the contributions: the logit before a softcap."""
        return sum(contribution.logit for contribution in self.contributions)

    def largest(self, count: int) -> list[Contribution]:
        """Return the contributions with the largest absolute value."""
        return sorted(self.contributions, key=lambda contribution: -abs(contribution.logit))[:count]


@dataclass(frozen=True)
class _Summand:
    """A vector (D,) that one part of the network added to the residual stream."""

    part: str
    layer: int | None
    head: int | None
    vector: Tensor


@torch.no_grad()
def attribute_logit(
    trace: Trace, token: int, position: int = -1, *, against: int | None = None, by_head: bool = False
) -> Attribution:
    """Attribute the logit of `token` at `position` to the parts of the network.

    against: attribute the difference to the logit of this token instead. by_head: list each attention head.
    """
    network = trace.require_network()
    _check_logit_is_sum(trace)
    position, vocab_size = trace.resolve_position(position), trace.config.vocab_size
    token = check_index("token", token, vocab_size)
    direction, bias = _unembedding(network, token)
    if against is not None:
        other_direction, other_bias = _unembedding(network, check_index("token", against, vocab_size))
        direction, bias = direction - other_direction, bias - other_bias
    norm = _FrozenNorm.at(trace.layer_stack(None).final_norm, trace.residual(trace.num_layers)[position])
    with evaluation_mode(network):
        summands = _decompose_residual(trace, position, by_head)
    contributions = [
        Contribution(summand.part, summand.layer, (norm(summand.vector) @ direction).item(), summand.head)
        for summand in summands
    ]
    contributions.append(Contribution("bias", None, (norm.offset @ direction).item() + bias))
    return Attribution(token, position, contributions)


def _decompose_residual(trace: Trace, position: int, by_head: bool) -> list[_Summand]:
    """Return the vectors that add up to the residual stream after the last layer at one position."""
    summands = [_Summand("embedding", None, None, trace.residual(0)[position])]
    for layer in range(trace.num_layers):
        replay = trace.replay(layer).at(torch.tensor([position]))
        attention = replay.attention[0, 0]
        if by_head:
            heads = _head_outputs(replay)  # (N, D)
            summands += [_Summand("attention", layer, head, output) for head, output in enumerate(heads)]
            attention = attention - heads.sum(dim=0)  # the biases of the output projection and of the branch norm
        summands.append(_Summand("attention", layer, None, attention))
        if trace.config.is_encoder_decoder:
            summands.append(_Summand("cross_attention", layer, None, replay.cross_attention[0, 0]))
        summands.append(_Summand("feed_forward", layer, None, replay.feed_forward[0, 0]))
    return summands


def _head_outputs(replay: BlockReplay) -> Tensor:
    """Return what each head adds to the residual stream at one position (N, D), through the branch norm if any."""
    block, outputs = replay.block, replay.heads().compute().output[0, :, 0]  # (N, H)
    projection = cast(nn.Linear, block.attention.output)
    projected = torch.einsum("nh,dnh->nd", outputs, projection.weight.unflatten(1, outputs.shape))
    residual = block.attention_residual
    return _FrozenNorm.at(residual.branch_norm, projection(outputs.flatten()))(projected) * residual.scale


@dataclass(frozen=True)
class _FrozenNorm:
    """A norm with the divisor fixed to that of one vector: gain · (x - mean(x) if centered) / divisor.

    The offset is kept apart; calling the norm does not add it.
    """

    gain: Tensor
    offset: Tensor
    divisor: Tensor
    centered: bool

    def __call__(self, x: Tensor) -> Tensor:
        x = _at_least_float32(x)
        return self.gain * (x - x.mean(dim=-1, keepdim=True) if self.centered else x) / self.divisor

    @staticmethod
    def at(norm: nn.Module, x: Tensor) -> "_FrozenNorm":
        """Return a norm layer with its divisor for x (D,)."""
        x = _at_least_float32(x)
        zero, one = torch.zeros_like(x), x.new_ones(())
        match norm:
            case RmsNormLayer():
                gain = norm.weight + 1 if norm.config.unit_offset else norm.weight
                return _FrozenNorm(gain, zero, (x.square().mean() + norm.config.epsilon).sqrt(), centered=False)
            case nn.LayerNorm():
                divisor = (x.var(correction=0) + norm.eps).sqrt()
                offset = zero if norm.bias is None else _at_least_float32(norm.bias)
                gain = torch.ones_like(x) if norm.weight is None else norm.weight
                return _FrozenNorm(gain + isinstance(norm, OffsetLayerNorm), offset, divisor, centered=True)
            case DeviationNormLayer():
                return _FrozenNorm(norm.weight, _at_least_float32(norm.bias), x.std() + norm.epsilon, centered=True)
            case _:
                return _FrozenNorm(torch.ones_like(x), zero, one, centered=False)


def _at_least_float32(x: Tensor) -> Tensor:
    """Cast half precision to float32: the squares of a residual stream overflow float16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _unembedding(network: Transformer, token: int) -> tuple[Tensor, float]:
    """Return the direction (D,) whose product with the normalized stream is the token's logit, and the logit's bias."""
    head, stack = network.head, network.decoder or network.encoder
    assert head is not None
    assert stack is not None
    table = stack.token_embedding.tokens.weight if head.weight is None else head.weight
    if not isinstance(table, Tensor):
        raise ClearheadError("the weights of this model are packed; load it with full weights to attribute logits")
    return _at_least_float32(table[token]) * head.config.scale, 0.0 if head.bias is None else head.bias[token].item()


def _check_logit_is_sum(trace: Trace) -> None:
    """Raise ClearheadError if the logits are not a sum over the residual stream."""
    head, layers = trace.config.head, trace.config.output_stack.layers
    if head is None or head.transform is not None:
        raise ClearheadError(
            "the logits of this model are not a sum over its residual stream: "
            "it has no vocabulary head, or one that is not linear"
        )
    if any(layer.placement == "post" for layer in layers):
        raise ClearheadError(
            "this model normalizes after every residual, so its residual stream is not a sum; use ablate instead"
        )
