"""Which parts of the network spoke for a token: its logit as a sum over what each part added to the stream.

    for share in attribute(trace, token=42).largest(5): print(share.part, share.layer, share.head, share.logit)

The stream before the last norm is embedding + Σ branches, and the norm, its divisor held fixed, is linear: every
summand has its own logit, and they add up to the model's (Elhage et al. 2021, "direct" effects; what a part does by
way of later parts is theirs). A cap on the logits comes after the sum.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from clearhead.errors import ClearheadError
from clearhead.inspection.heads import index
from clearhead.inspection.trace import Trace
from clearhead.model import DeviationNormLayer, RmsNormLayer, Transformer


@dataclass(frozen=True)
class Share:
    part: str  # embedding, attention, cross_attention, feed_forward; bias: of the last norm and the head
    layer: int | None
    logit: float
    head: int | None = None  # of an attention; None: all of it, or where heads have their own shares, its biases


@dataclass(frozen=True)
class Attribution:
    token: int
    position: int
    shares: list[Share]

    @property
    def logit(self) -> float:
        """Of the token, before a cap."""
        return sum(share.logit for share in self.shares)

    def largest(self, count: int) -> list[Share]:
        """For or against the token."""
        return sorted(self.shares, key=lambda share: -abs(share.logit))[:count]


@torch.no_grad()
def attribute(
    trace: Trace, token: int, position: int = -1, *, against: int | None = None, by_head: bool = False
) -> Attribution:
    """The logit of `token` after `position`, or its lead over the logit of `against`; attention by heads if asked."""
    network = trace.need_network()
    check_sums(trace)
    position, vocab_size = trace.position(position), trace.config.vocab_size
    token = index("token", token, vocab_size)
    direction, bias = unembedding(network, token)
    if against is not None:
        other, other_bias = unembedding(network, index("token", against, vocab_size))
        direction, bias = direction - other, bias - other_bias
    norm = FrozenNorm.at(trace.layer_stack(None).final_norm, trace.residual(trace.num_layers)[position])
    summands = parts_of(trace, position, by_head)
    shares = [Share(part, layer, (norm(x) @ direction).item(), head) for part, layer, head, x in summands]
    return Attribution(token, position, [*shares, Share("bias", None, (norm.offset @ direction).item() + bias)])


def parts_of(trace: Trace, position: int, by_head: bool) -> list[tuple[str, int | None, int | None, Tensor]]:
    """Part, layer, head and what was added (D,): together the stream after the last layer."""
    found: list[tuple[str, int | None, int | None, Tensor]] = [("embedding", None, None, trace.residual(0)[position])]
    for layer in range(trace.num_layers):
        whole = trace.attention_output(layer)[position]
        if by_head:
            heads = head_outputs(trace, layer, position)  # (N, D)
            found += [("attention", layer, number, output) for number, output in enumerate(heads)]
            whole = whole - heads.sum(dim=0)  # biases: of the last matrix, of the branch's norm
        found.append(("attention", layer, None, whole))
        if trace.config.is_encoder_decoder:
            found.append(("cross_attention", layer, None, trace.cross_attention_output(layer)[position]))
        found.append(("feed_forward", layer, None, trace.feed_forward(layer)[position]))
    return found


def head_outputs(trace: Trace, layer: int, position: int) -> Tensor:
    """What each head writes to the stream at one place (N, D); through the norm of its branch where there is one."""
    block, heads = trace.replay(layer).block, trace.self_heads(layer).only(None, torch.tensor([position]))
    last, given = cast(nn.Linear, block.attention.output), heads.attended.output[0, :, 0]  # (N, H)
    written = torch.einsum("nh,dnh->nd", given, last.weight.unflatten(1, given.shape))
    return FrozenNorm.at(block.attention_residual.branch_norm, last(given.flatten()))(written)


@dataclass(frozen=True)
class FrozenNorm:
    """A norm whose divisor is that of one vector: gain · (x - mean(x) where centred) / divisor, then the offset."""

    gain: Tensor
    offset: Tensor
    divisor: Tensor
    centred: bool

    def __call__(self, x: Tensor) -> Tensor:
        x = wide(x)
        return self.gain * (x - x.mean(dim=-1, keepdim=True) if self.centred else x) / self.divisor

    @staticmethod
    def at(norm: nn.Module, x: Tensor) -> "FrozenNorm":
        x = wide(x)
        zero, one = torch.zeros_like(x), x.new_ones(())
        match norm:
            case RmsNormLayer():
                gain = norm.weight + 1 if norm.config.unit_offset else norm.weight
                return FrozenNorm(gain, zero, (x.square().mean() + norm.config.epsilon).sqrt(), centred=False)
            case nn.LayerNorm():
                divisor = (x.var(correction=0) + norm.eps).sqrt()
                return FrozenNorm(norm.weight, zero if norm.bias is None else wide(norm.bias), divisor, centred=True)
            case DeviationNormLayer():
                return FrozenNorm(norm.weight, wide(norm.bias), x.std() + norm.epsilon, centred=True)
            case _:
                return FrozenNorm(torch.ones_like(x), zero, one, centred=False)


def wide(x: Tensor) -> Tensor:
    """In float32 at least: the squares of a stream do not fit into float16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def unembedding(network: Transformer, token: int) -> tuple[Tensor, float]:
    """The direction (D,) whose product with the normed stream is the token's logit, and what is added to it."""
    head, stack = network.head, network.decoder or network.encoder
    assert head is not None
    assert stack is not None
    table = stack.embedding.tokens.weight if head.weight is None else head.weight
    if not isinstance(table, Tensor):
        raise ClearheadError("the weights of this model are packed; load it with full ones to share a logit out")
    return wide(table[token]) * head.config.scale, 0.0 if head.bias is None else head.bias[token].item()


def check_sums(trace: Trace) -> None:
    head, layers = trace.config.head, trace.config.output_stack.layers
    if head is None or head.transform is not None:
        raise ClearheadError("logits are no sum over the stream here: the model has no head, or one that is not linear")
    if any(layer.placement == "post" for layer in layers):
        raise ClearheadError("a norm stands after every residual of this model, so its stream is no sum; use ablate")
