"""Checks of the fast ways: the step in kernels changes nothing, and fewer bits change as little as they should.

compared = kernel_step(subject); compared.difference

Packed weights cannot give equal logits. Their relative error is reported and bounded: rounding to 255 steps in a group
of 32 costs half a percent of a matrix, to 16 steps nine, and layers add to it.
"""

from copy import deepcopy

import torch
from torch import Tensor

from clearhead.cache.cache import KeyValueCache
from clearhead.errors import ClearheadError
from clearhead.fast.modules import pack_network
from clearhead.fast.packed import Bits
from clearhead.fast.stack import accelerate, why_not
from clearhead.model.transformer import Transformer
from clearhead.verification.finding import Comparison, Skipped
from clearhead.verification.subject import Subject

LARGEST_ERROR: dict[Bits, float] = {"int8": 0.1, "int4": 0.8}


def kernel_step(subject: Subject) -> Comparison:
    """A third of the text at once, the rest token by token in the kernels."""
    if reason := why_not(subject.network):
        raise Skipped(f"the kernels do not know {reason}")
    network = deepcopy(subject.network)
    try:
        accelerate(network)
    except ClearheadError as error:
        raise Skipped(str(error)) from None
    tokens = subject.tokens()
    start = tokens.shape[1] // 3
    found = stepwise(network, subject, tokens, start)
    return Comparison([(found, subject.expected[0][:, start:])], f"{tokens.shape[1] - start} steps")


def stepwise(network: Transformer, subject: Subject, tokens: Tensor, start: int) -> Tensor:
    cache, logits = KeyValueCache(network.config), []
    network.hidden(tokens[:, :start], memory=subject.memory(), cache=cache)
    cache.advance()
    for place in range(start, tokens.shape[1]):
        hidden = network.hidden(tokens[:, place : place + 1], memory=subject.memory(), cache=cache)
        cache.advance()
        logits.append(network.to_logits(hidden))
    return torch.cat(logits, dim=1).to(subject.dtype)


def eight_bits(subject: Subject) -> Comparison:
    return packed(subject, "int8")


def four_bits(subject: Subject) -> Comparison:
    return packed(subject, "int4")


def packed(subject: Subject, bits: Bits) -> Comparison:
    if subject.config.head is None:
        raise Skipped("a model without a head gives no distribution")
    network = pack_network(deepcopy(subject.network), bits)
    memory = None if subject.config.encoder is None or subject.config.decoder is None else subject.memory()
    hidden = network.hidden(subject.tokens(), memory=memory)
    found, full = network.to_logits(hidden).float(), subject.expected[0].float()
    real = full.isfinite() & (full > full.amax() - 1000)  # a padding token ruled out at -10000 says nothing
    error = ((found - full)[real].norm() / (full - full.mean(-1, keepdim=True))[real].norm()).item()
    agree = (found.argmax(-1) == full.argmax(-1)).float().mean().item()
    detail = f"relative error of logits; the likeliest token is the same at {agree:.0%} of {full.shape[1]} places"
    return Comparison([(torch.tensor([error]), torch.zeros(1))], detail, LARGEST_ERROR[bits])
