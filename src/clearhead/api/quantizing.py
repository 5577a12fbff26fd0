"""Quantize a model so that its predictions on a text change least, and say how much they changed.

loss = quantize_for_text(model, Path("book.txt").read_text(), "int4"); print(loss.perplexity_after)
"""

from typing import get_args

import torch

from clearhead.api.devices import resolve_dtype
from clearhead.api.model import Model
from clearhead.backends import Bits
from clearhead.checkpoint import Progress, RoundingLoss, pack_for_text
from clearhead.errors import ClearheadError, unknown_name


def quantize_for_text(
    model: Model,
    text: str,
    weights: Bits = "int4",
    *,
    dtype: torch.dtype | str | None = None,
    progress: Progress | None = None,
) -> RoundingLoss:
    """Quantize a decoder in place, with rounding that is calibrated on a text (GPTQ), and return the loss.

    The model must have full weights. The last fifth of the text, at most 4,096 tokens, is kept apart to measure the
    loss. Token table, logit head and other sensitive matrices get 8 bits. `dtype` is that of everything else
    afterwards, by default bfloat16.
    """
    if weights not in get_args(Bits):
        raise unknown_name("weights", str(weights), get_args(Bits))
    if model.tokenizer is None:
        raise ClearheadError("a model without a tokenizer cannot be calibrated on a text; use load(..., weights=…)")
    loss = pack_for_text(model.network, model.tokenizer.encode(text), weights, progress)
    model.network.to(resolve_dtype(dtype) or torch.bfloat16)
    return loss
