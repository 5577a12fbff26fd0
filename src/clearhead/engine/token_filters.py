"""Collect the tokens that the filters of some sequences allow (`TokenFilter`).

allowed, errors = allowed_tokens(sequences, vocab_size)
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from clearhead.engine.sequence import EngineSequence
from clearhead.errors import ClearheadError


def allowed_tokens(sequences: Sequence[EngineSequence], vocab_size: int) -> tuple[Tensor | None, dict[int, str]]:
    """Return which tokens may come next (B, V), None if no sequence has a filter, and errors by row.

    A row with an error allows every token, so that the others can be sampled.
    """
    if all(sequence.request.token_filter is None for sequence in sequences):
        return None, {}
    allowed = torch.ones(len(sequences), vocab_size, dtype=torch.bool)
    errors: dict[int, str] = {}
    for row, sequence in enumerate(sequences):
        try:
            if (mask := _mask_of(sequence, vocab_size)) is not None:
                allowed[row] = mask
        except ClearheadError as error:
            errors[row] = str(error)
        except Exception as error:
            errors[row] = f"the token filter of this request failed with {type(error).__name__}: {error}"
    return allowed, errors


def _mask_of(sequence: EngineSequence, vocab_size: int) -> Tensor | None:
    """Return the tokens that a sequence may continue with (V,); None allows all."""
    token_filter, options = sequence.request.token_filter, sequence.request.options
    given = None if token_filter is None else token_filter.allowed_tokens()
    if given is None:
        return None
    mask = _as_bools(torch.as_tensor(given).cpu(), vocab_size)
    if not mask.any():
        raise ClearheadError("the token filter of this request allows no token; allow a stop token to end the text")
    if len(sequence.output) < options.min_new_tokens and options.stop_ids:
        mask = mask.index_fill(0, torch.tensor(options.stop_ids), False)
        if not mask.any():
            raise ClearheadError(
                f"the token filter of this request ends the text after {len(sequence.output)} tokens, but "
                f"min_new_tokens is {options.min_new_tokens}; ask for fewer"
            )
    return mask


def _as_bools(given: Tensor, vocab_size: int) -> Tensor:
    """Return bools (V,) from bools or from bits in int32."""
    num_words = -(-vocab_size // 32)
    if given.dtype == torch.bool and given.shape == (vocab_size,):
        return given
    if given.dtype == torch.int32 and given.shape == (num_words,):
        bits = np.unpackbits(given.contiguous().numpy().view(np.uint8), bitorder="little")
        return torch.from_numpy(bits[:vocab_size].astype(bool))
    raise ClearheadError(
        f"the token filter of this request returned {tuple(given.shape)} numbers of {given.dtype}; it must return "
        f"{vocab_size} bools or {num_words} int32"
    )
