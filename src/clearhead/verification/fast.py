"""Checks of the fast ways: the step in kernels changes nothing, and fewer bits change as little as they should.

compared = kernel_step(subject); compared.difference

Packed weights cannot give equal logits. Their relative error is reported and bounded: rounding to 255 steps in a group
of 32 costs half a percent of a matrix, to 16 steps nine, and layers add to it. Kernels round what they multiply by to
255 steps too, so that eight bits cost √2 of that.
"""

from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor

from clearhead.backends import AcceleratedStack, Bits, accelerate, is_packed, pack_network, why_no_cpu_kernels
from clearhead.cache import KeyValueCache
from clearhead.errors import ClearheadError
from clearhead.model import EncoderOutput, Transformer
from clearhead.verification.finding import Comparison, Skipped
from clearhead.verification.generating import need_decoder
from clearhead.verification.subject import Subject

LARGEST_ERROR: dict[Bits, float] = {"int8": 0.1, "int4": 0.8}


def kernel_step(subject: Subject) -> Comparison:
    """One row from its second token on, and the later half of a padded batch."""
    need_decoder(subject)
    fast = with_network(subject, accelerated(subject.network))
    tokens, mask = fast.padded(fast.rows, "left")
    half = tokens.shape[1] // 2
    alone = stepwise(fast.network, fast.tokens(), None, fast.encoder_output(), 1)
    together = stepwise(fast.network, tokens, mask, fast.encoder_output(None), half)
    pairs = [(alone, subject.expected[0][:, 1:])]
    for logits, real, expected in zip(together, mask[:, half:], subject.expected, strict=True):
        pairs.append((logits[real][None], expected[:, -int(real.sum()) :]))
    return Comparison(pairs, f"{alone.shape[1]} steps alone, {together.shape[1]} in a padded batch")


def accelerated(network: Transformer) -> Transformer:
    """A copy that steps in the kernels."""
    if reason := why_no_cpu_kernels(network):
        raise Skipped(f"the kernels do not know {reason}")
    network = deepcopy(network)
    try:
        accelerate(network)
    except ClearheadError as error:
        raise Skipped(str(error)) from None
    assert isinstance(network.decoder, AcceleratedStack)
    if network.decoder.current_plan() is None:
        raise Skipped("its modules were exchanged or hooked into")
    return network


def stepwise(
    network: Transformer, tokens: Tensor, mask: Tensor | None, encoder_output: EncoderOutput | None, start: int
) -> Tensor:
    """Logits (B, T - start, V) of the tokens from `start` on, each run alone after all before it."""
    cache, logits = KeyValueCache(network.config), []
    encoder_output = None if encoder_output is None else network.precompute_cross_attention(encoder_output)
    for first, last in ((0, start), *((place, place + 1) for place in range(start, tokens.shape[1]))):
        piece = None if mask is None else mask[:, first:last]
        hidden = network.hidden_states(tokens[:, first:last], piece, encoder_output=encoder_output, cache=cache)
        cache.advance()
        logits.append(network.to_logits(hidden))
    return torch.cat(logits[1:], dim=1)


def eight_bits(subject: Subject) -> Comparison:
    return packed(subject, "int8")


def four_bits(subject: Subject) -> Comparison:
    return packed(subject, "int4")


def packed(subject: Subject, bits: Bits) -> Comparison:
    if subject.config.head is None:
        raise Skipped("a model without a head gives no distribution")
    if is_packed(subject.network):
        raise Skipped("its weights are packed already")
    small = with_network(subject, pack_network(deepcopy(subject.network), bits))
    found, full = small.expected[0].float(), subject.expected[0].float()
    ruled_out = full < full.amax() - 1000  # as the padding of Marian is, at -10000; it says nothing
    off = (found - full).masked_fill(ruled_out, 0.0)
    spread = full - full.masked_fill(ruled_out, torch.nan).nanmean(dim=-1, keepdim=True)
    spread = spread.masked_fill(ruled_out, 0.0)
    # The median of the places: where a router's choice is near a tie, any rounding decides for another expert.
    error = (off.norm(dim=-1) / spread.norm(dim=-1)).median().item()
    agree = (found.argmax(-1) == full.argmax(-1)).float().mean().item()
    detail = f"median error of logits; the likeliest token is the same at {agree:.0%} of {full.shape[1]} places"
    return Comparison([(torch.tensor([error]), torch.zeros(1))], detail, LARGEST_ERROR[bits])


def with_network(subject: Subject, network: Transformer) -> Subject:
    return replace(subject, model=replace(subject.model, network=network))
