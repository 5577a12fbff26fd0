"""Check token ids against what a stack can read: its vocabulary, and the length of a table of learned positions.

    check_tokens([3, 17], config.output_stack); remaining_positions(config.output_stack, length=2)

Tokens are checked as plain lists, because the network does not inspect their values on an accelerator.
"""

from collections.abc import Sequence

from clearhead.architecture.config import Stack
from clearhead.architecture.positions import LearnedPositions
from clearhead.errors import ClearheadError

_UNLIMITED = 2**62


def check_tokens(ids: Sequence[int], stack: Stack, num_before: int = 0) -> None:
    """Raise ClearheadError unless a stack can read these tokens after `num_before` others."""
    if not ids:
        raise ClearheadError("the text is empty; give at least one token")
    vocab_size = stack.token_embedding.vocab_size
    positions = stack.token_embedding.positions
    invalid = next((token for token in ids if not 0 <= token < vocab_size), None)
    if invalid is not None:
        raise ClearheadError(f"token id {invalid} is out of range; this model has the ids 0 to {vocab_size - 1}")
    length = num_before + len(ids)
    if isinstance(positions, LearnedPositions) and length > positions.num_positions:
        raise ClearheadError(f"the text has {length} tokens; this model reads at most {positions.num_positions}")


def remaining_positions(stack: Stack, length: int) -> int:
    """Return how many tokens a stack with learned positions can add to `length` tokens; others have no limit.

    The last of them needs no position, since it is not read again.
    """
    positions = stack.token_embedding.positions
    if not isinstance(positions, LearnedPositions):
        return _UNLIMITED
    return positions.num_positions - length + 1
