"""Measure how much each input of a linear layer matters on a text: the mean square of its values.

    importance = measure_importance(network, tokens)["decoder.layers.0.feed_forward.down.weight"]      # (K,)

An error in column k of a weight changes the output by error · x[k], so its square counts as much as the mean of x[k]².
Source of the idea: the importance matrix of llama.cpp; the same statistic is the diagonal of GPTQ's Hessian.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from clearhead.errors import ClearheadError
from clearhead.model import Transformer

_MIN_TOKENS = 64
_MAX_TOKENS = 1 << 16  # more change the means by less than a percent
_WINDOW = 512  # tokens that are read at once, each window by itself


def measure_importance(network: Transformer, tokens: Sequence[int]) -> dict[str, Tensor]:
    """Return the mean squares (K,) of the inputs of every linear layer and of the logit head, by the names of weights.

    The network must be a decoder with plain modules.
    """
    if network.decoder is None or network.encoder is not None:
        raise ClearheadError("only a decoder can be calibrated on a text; leave out the calibration text")
    if len(tokens) < _MIN_TOKENS:
        raise ClearheadError(f"the calibration text has {len(tokens)} tokens; give one with at least {_MIN_TOKENS}")
    sums: dict[str, Tensor] = {}
    linear = {name: part for name, part in network.named_modules() if isinstance(part, nn.Linear)}
    hooks = [
        part.register_forward_pre_hook(partial(_add_squares, sums, f"{name}.weight")) for name, part in linear.items()
    ]
    head = "head.weight" if network.head is not None and network.head.weight is not None else None
    window = min(_WINDOW, network.config.context or _WINDOW)
    text = torch.tensor(tokens[:_MAX_TOKENS], device=network.device)
    try:
        with torch.inference_mode():
            for part in text.split(window):
                hidden = network.hidden_states(part[None])
                _add_squares(sums, head or "decoder.embedding.tokens.weight", None, (hidden,))
    finally:
        for hook in hooks:
            hook.remove()
    return {name: total.cpu() / len(text) for name, total in sums.items()}


def _add_squares(sums: dict[str, Tensor], name: str, module: object, inputs: tuple[Tensor, ...]) -> None:
    """Add the sum of x² over all tokens to that of a layer."""
    squares = inputs[0].detach().float().flatten(0, -2).square().sum(dim=0)
    sums[name] = sums[name] + squares if name in sums else squares
