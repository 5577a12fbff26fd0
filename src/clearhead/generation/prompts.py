"""Prompts before the network sees them: checked as plain lists, padded, read by an encoder.

    ids = token_ids("Hello", tokenizer); check_tokens(ids, network.config.output_stack)

On an accelerator the network does not look at values, so what is wrong with a prompt is said here.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import index

import torch
from torch import Tensor

from clearhead.architecture import LearnedPositions, Stack
from clearhead.errors import ClearheadError
from clearhead.model import EncoderOutput, Transformer
from clearhead.tokenization import Tokenizer

Prompt = str | Sequence[int]
# CUDA and Apple's GPUs, the processor, one buffer beyond what Apple's GPUs take; only CUDA has a type for it.
NO_MEMORY = "out of memory|can't allocate memory|Invalid buffer size"


def token_ids(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(prompt, str):
        return encoded(prompt, require_tokenizer(tokenizer))
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes):
        raise ClearheadError(f"the prompt is {prompt!r}; it must be a text or a list of token ids")
    try:
        return [index(token) for token in prompt]
    except TypeError:
        raise ClearheadError(
            f"the prompt {prompt!s:.60} is neither a text nor a list of token ids; generate_many takes several"
        ) from None


def encoded(text: str, tokenizer: Tokenizer) -> list[int]:
    """Its ids; characters that no token stands for are named, since the model does not see which they are."""
    ids, unknown = tokenizer.encode(text), tokenizer.unknown_id
    if unknown in ids:
        lost = [one for one in dict.fromkeys(text) if unknown in tokenizer.encode(one, add_special_tokens=False)]
        if lost and tokenizer.special_ids.issuperset(ids):
            raise ClearheadError(f"this model has no token for any character of {text[:40]!r}")
        if lost:
            named = ", ".join(map(repr, lost[:8])) + ", …" * (len(lost) > 8)
            warnings.warn(f"this model has no token for {named}, and reads an unknown one in its place", stacklevel=2)
    return ids


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise ClearheadError("this model has no tokenizer: it knows token ids, and no text")
    return tokenizer


def check_tokens(ids: Sequence[int], stack: Stack, num_before: int = 0) -> None:
    """That a stack can read them after `num_before` others."""
    if not ids:
        raise ClearheadError("the text is empty; it takes at least one token")
    vocab_size, positions = stack.embedding.vocab_size, stack.embedding.positions
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ClearheadError(f"token id {wrong} is out of range: this model has {vocab_size}")
    length = num_before + len(ids)
    if isinstance(positions, LearnedPositions) and length > positions.num_positions:
        raise ClearheadError(f"the text has {length} tokens; this model reads {positions.num_positions} at most")


def pad_right(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and mask (B, T)."""
    longest = max(len(row) for row in rows)
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    lengths = torch.tensor([[len(row)] for row in rows], device=device)
    return tokens, torch.arange(longest, device=device)[None] < lengths


@torch.inference_mode()
def encode_sources(network: Transformer, sources: Sequence[Sequence[int]]) -> EncoderOutput:
    """What the encoder leaves of each; equal ones are read once."""
    different = list(dict.fromkeys(map(tuple, sources)))
    tokens, mask = pad_right(different, network.device)
    encoder_output = network.precompute_cross_attention(network.encode(tokens, mask))
    places = [different.index(tuple(source)) for source in sources]
    return encoder_output.select(torch.tensor(places, device=tokens.device))


@contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Where there is not, one sentence; the network keeps no state, so it works as before."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not re.search(NO_MEMORY, str(error)):
            raise
        raise ClearheadError(
            "there is not enough memory for so many tokens; a shorter prompt, fewer prompts at once or a lower "
            "max_new_tokens takes less"
        ) from None
