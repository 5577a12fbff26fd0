"""Checks of the backends: the C++ kernels change no logits, and packed weights change them within bounds.

comparison = cpu_kernels(case); comparison.difference

Packed weights cannot give equal logits. Their relative error is reported and bounded: rounding to 255 levels in a group
of 32 costs half a percent of a matrix, to 16 levels nine percent, and layers add to it. The kernels round activations
to 255 levels too, so that 8 bits cost √2 of that.
"""

from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from clearhead.backends import AcceleratedStack, Bits, accelerate, is_packed, pack_network, unsupported_network_reason
from clearhead.cache import KeyValueCache, forward_step
from clearhead.errors import ClearheadError
from clearhead.model import EncoderOutput, Transformer
from clearhead.verification.case import VerificationCase
from clearhead.verification.generation_checks import require_decoder
from clearhead.verification.results import CheckSkipped, LogitComparison

_MAX_RELATIVE_ERROR: dict[Bits, float] = {"int8": 0.1, "int4": 0.8}
_EXCLUDED_BELOW_MAXIMUM = 1000  # logits this far below the largest exclude a token: -10000 for padding in Marian


def cpu_kernels(case: VerificationCase) -> LogitComparison:
    """Check one sequence from its second token on, and the second half of a padded batch."""
    require_decoder(case)
    accelerated = _with_network(case, _accelerate_copy(case.network))
    tokens, mask = accelerated.pad(case.sequences, "left")
    half = tokens.shape[1] // 2
    network = accelerated.network
    single = decode_steps(network, accelerated.tokens(), None, accelerated.encoder_output(), 1)
    batched = decode_steps(network, tokens, mask, accelerated.encoder_output(None), half)
    pairs = [(single, case.expected[0][:, 1:])]
    for logits, is_real, expected in zip(batched, mask[:, half:], case.expected, strict=True):
        pairs.append((logits[is_real][None], expected[:, -int(is_real.sum()) :]))
    return LogitComparison(pairs, f"{single.shape[1]} steps alone, {batched.shape[1]} in a padded batch")


def _accelerate_copy(network: Transformer) -> Transformer:
    """Return a copy of the network that decodes in the C++ kernels; skip the check if they do not support it."""
    if reason := unsupported_network_reason(network, "cpu"):
        raise CheckSkipped(f"the C++ kernels cannot run this model: {reason}")
    network = deepcopy(network)
    try:
        accelerate(network)
    except ClearheadError as error:
        raise CheckSkipped(str(error)) from None
    assert isinstance(network.decoder, AcceleratedStack)
    if network.decoder.current_plan() is None:
        raise CheckSkipped("modules of the network were replaced or have hooks")
    return network


def decode_steps(
    network: Transformer, tokens: Tensor, mask: Tensor | None, encoder_output: EncoderOutput | None, start: int
) -> Tensor:
    """Read tokens (B, T) up to `start` at once and the others one by one; return the latter's logits."""
    cache, logits = KeyValueCache(network.config), []
    encoder_output = None if encoder_output is None else network.precompute_cross_attention(encoder_output)
    for first, last in ((0, start), *((index, index + 1) for index in range(start, tokens.shape[1]))):
        chunk, chunk_mask = tokens[:, first:last], None if mask is None else mask[:, first:last]
        step = forward_step(network, chunk, cache, chunk_mask, encoder_output, absorb=False, last_only=False)
        logits.append(step)
    return torch.cat(logits[1:], dim=1)


def int8_weights(case: VerificationCase) -> LogitComparison:
    """Check weights packed in 8 bits."""
    return _packed_weights(case, "int8")


def int4_weights(case: VerificationCase) -> LogitComparison:
    """Check weights packed in 4 bits."""
    return _packed_weights(case, "int4")


def _packed_weights(case: VerificationCase, bits: Bits) -> LogitComparison:
    """Check that the median relative error of the logits with packed weights is within bounds."""
    if case.config.head is None:
        raise CheckSkipped("the model has no vocabulary head")
    if is_packed(case.network):
        raise CheckSkipped("the weights of the model are already packed")
    packed = _with_network(case, pack_network(deepcopy(case.network), bits))
    actual, full = packed.expected[0].float(), case.expected[0].float()
    is_excluded = full < full.amax() - _EXCLUDED_BELOW_MAXIMUM
    error = (actual - full).masked_fill(is_excluded, 0.0)
    centered = full - full.masked_fill(is_excluded, torch.nan).nanmean(dim=-1, keepdim=True)
    centered = centered.masked_fill(is_excluded, 0.0)
    # The median over positions: where a router is near a tie, rounding can choose another expert.
    median_error = (error.norm(dim=-1) / centered.norm(dim=-1)).median().item()
    agreement = (actual.argmax(-1) == full.argmax(-1)).float().mean().item()
    expected, found = full.log_softmax(-1), actual.log_softmax(-1)
    divergence = functional.kl_div(found, expected, reduction="none", log_target=True).sum(-1).mean().item()
    detail = (
        f"median error of the logits; the same most likely token at {agreement:.0%} of {full.shape[1]} positions, "
        f"KL divergence {divergence:.2g} nats"
    )
    return LogitComparison([(torch.tensor([median_error]), torch.zeros(1))], detail, _MAX_RELATIVE_ERROR[bits])


def _with_network(case: VerificationCase, network: Transformer) -> VerificationCase:
    """Return the case with another network."""
    return replace(case, model=replace(case.model, network=network))
