"""Quantize a decoder with weights that are rounded for a text, and measure on another part of it what that costs.

    loss = pack_for_text(network, tokens, "int4"); print(loss)

The layers are quantized one after the other (GPTQ: backends/packed/calibrated.py). The inputs of a layer are those that
the layers before it produce with their rounded weights, so that later layers also correct errors of earlier ones. Token
table and logit head get 8 bits, and so do the projections that backends/sensitivity.py names.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.backends import Bits, choose_bits, is_packable, is_packed, pack, pack_calibrated, set_packed_weight
from clearhead.checkpoint.interface import Progress
from clearhead.errors import ClearheadError
from clearhead.model import MixtureLayer, Transformer

_WINDOW = 512  # tokens that are read at once, each window by itself
_MAX_WINDOWS = 32  # more change the loss by less than its own uncertainty
_MAX_HELD_OUT = 8  # windows for measuring the loss


@dataclass(frozen=True)
class RoundingLoss:
    """What a model lost when its weights were rounded, on tokens that it was not calibrated on."""

    num_tokens: int
    perplexity_before: float
    perplexity_after: float
    divergence: float  # mean KL divergence of the next-token distributions, in nats
    agreement: float  # share of positions with the same most likely token


@torch.inference_mode()
def pack_for_text(
    network: Transformer, tokens: Sequence[int], bits: Bits, progress: Progress | None = None
) -> RoundingLoss:
    """Quantize a decoder in place, calibrated on all but the last part of the tokens, and return the loss there."""
    windows = _split_windows(network, tokens)
    num_held_out = min(_MAX_HELD_OUT, max(1, len(windows) // 5))
    text, held_out = windows[:-num_held_out][:_MAX_WINDOWS], windows[-num_held_out:]
    before = [_log_probabilities(network, window) for window in held_out]
    _pack_layers(network, text, bits, progress)
    for name in [name for name, _ in network.named_parameters() if is_packable(network, name)]:
        weight = network.get_parameter(name)
        set_packed_weight(network, name, pack(weight, "int8"), weight.dtype)
    return _compare(network, held_out, before)


def _split_windows(network: Transformer, tokens: Sequence[int]) -> list[Tensor]:
    """Return windows (1, T) of equal length; raise ClearheadError if the network or the text cannot be used."""
    if network.decoder is None or network.encoder is not None or network.head is None:
        raise ClearheadError("only a decoder can be calibrated on a text; leave out the calibration text")
    if is_packed(network):
        raise ClearheadError("the weights are already packed; load the model with full weights to calibrate them")
    if network.decoder.stack.shared_layers:
        raise ClearheadError("layers that share their weights cannot be calibrated; leave out the calibration text")
    window = min(_WINDOW, network.config.context or _WINDOW)
    needed = 2 * window
    if len(tokens) < needed:
        raise ClearheadError(f"the calibration text has {len(tokens)} tokens; give one with at least {needed}")
    whole = torch.tensor(tokens[: len(tokens) // window * window], device=network.device)
    return list(whole.view(-1, 1, window))


def _log_probabilities(network: Transformer, window: Tensor) -> Tensor:
    """Return log-probabilities (T, V) of the next token after each of a window."""
    return network(window)[0].float().log_softmax(dim=-1)


def _pack_layers(network: Transformer, windows: list[Tensor], bits: Bits, progress: Progress | None) -> None:
    """Quantize the layers of the decoder in place, from the first to the last."""
    assert network.decoder is not None
    states, arguments = _first_states(network, windows)
    blocks = network.decoder.layers
    for number in range(len(blocks)):
        name = f"decoder.layers.{number}"
        with _recorded_moments(blocks[number]) as moments:
            for state in states:
                blocks[number](state, *arguments[number])
        num_inputs = sum(state.shape[1] for state in states)
        for own_name, total in moments.items():
            _pack_weight(network, f"{name}.{own_name}", total / num_inputs, bits)
        states = [blocks[number](state, *arguments[number]) for state in states]
        if progress is not None:
            progress(name, number + 1, len(blocks))


def _pack_weight(network: Transformer, name: str, second_moments: Tensor, bits: Bits) -> None:
    """Replace a weight by its packed form; experts share the second moments of the inputs of all of them."""
    if not is_packable(network, name):
        return
    weight = network.get_parameter(name)
    bits = choose_bits(network.config, name, weight, bits)
    packed = pack_calibrated(weight.flatten(0, -2), second_moments, bits)
    set_packed_weight(network, name, packed, weight.dtype)


def _first_states(network: Transformer, windows: list[Tensor]) -> tuple[list[Tensor], list[tuple[Any, ...]]]:
    """Return the input of the first layer for each window, and the other arguments of each layer for any window."""
    assert network.decoder is not None
    states: list[Tensor] = []
    arguments: list[tuple[Any, ...]] = []
    hooks = [
        block.register_forward_pre_hook(lambda _, inputs: arguments.append(inputs[1:]))
        for block in network.decoder.layers
    ]
    try:
        network.decoder(windows[0], residuals={0: states})
    finally:
        for hook in hooks:
            hook.remove()
    embed = network.decoder.token_embedding
    positions = torch.arange(windows[0].shape[1], device=windows[0].device)[None]
    states += [embed(window, positions, None) for window in windows[1:]]
    return states, arguments


@contextmanager
def _recorded_moments(block: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield the sums of x xᵀ (K, K) over the inputs of each weight of a block, by its name in the block."""
    sums: dict[str, Tensor] = {}
    hooks = []
    for name, part in block.named_modules():
        if isinstance(part, nn.Linear):
            add = partial(_add_inputs, sums, f"{name}.weight")
            hooks.append(part.register_forward_pre_hook(lambda _, inputs, add=add: add(inputs[0])))
        elif isinstance(part, MixtureLayer):
            part.multiply = partial(_multiply_recorded, part, partial(_add_inputs, sums), name)  # type: ignore[method-assign]
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()
        for part in block.modules():
            if isinstance(part, MixtureLayer):
                del part.multiply


def _add_inputs(sums: dict[str, Tensor], name: str, inputs: Tensor) -> None:
    rows = inputs.detach().flatten(0, -2).float()
    sums[name] = sums[name].addmm_(rows.T, rows) if name in sums else rows.T @ rows


def _multiply_recorded(
    layer: MixtureLayer, add: Callable[[str, Tensor], None], name: str, x: Tensor, matrices: Tensor, expert: int
) -> Tensor:
    """Compute MixtureLayer.multiply and record its inputs."""
    attribute = next(key for key in ("gate", "up", "down") if getattr(layer, key) is matrices)
    add(f"{name}.{attribute}", x)
    return functional.linear(x, matrices[expert])


def _compare(network: Transformer, windows: list[Tensor], before: list[Tensor]) -> RoundingLoss:
    """Return the differences of the network's predictions from those before."""
    losses_before, losses, divergences, equal = [], [], [], []
    for window, reference in zip(windows, before, strict=True):
        actual = _log_probabilities(network, window)
        targets = window[0, 1:, None]
        losses_before.append(-reference[:-1].gather(1, targets))
        losses.append(-actual[:-1].gather(1, targets))
        divergences.append((reference.exp() * (reference - actual)).sum(dim=-1))
        equal.append(reference.argmax(dim=-1) == actual.argmax(dim=-1))
    return RoundingLoss(
        num_tokens=sum(window.numel() for window in windows),
        perplexity_before=float(torch.cat(losses_before).mean().exp()),
        perplexity_after=float(torch.cat(losses).mean().exp()),
        divergence=float(torch.cat(divergences).mean()),
        agreement=float(torch.cat(equal).float().mean()),
    )
