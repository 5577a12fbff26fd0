"""Prepare prompts: encode them, pad them to one length and run the encoder.

tokens, mask = pad_left([encode_prompt("Hello", tokenizer)], network.device)
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import index

import torch
from torch import Tensor

from clearhead.errors import ClearheadError, out_of_memory_message
from clearhead.model import EncoderOutput, Transformer
from clearhead.tokenization import Tokenizer

Prompt = str | Sequence[int]
_MAX_CHARACTERS_LISTED = 8


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """Return the token ids of a text; return token ids as a list.

    Warn about characters that the tokenizer has no token for, and raise ClearheadError if there is no other text.
    """
    if isinstance(prompt, str):
        return _encode_text(prompt, require_tokenizer(tokenizer))
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes):
        raise ClearheadError(f"the prompt is {prompt!r}; it must be a text or a list of token ids")
    try:
        return [index(token) for token in prompt]
    except TypeError:
        raise ClearheadError(
            f"the prompt {prompt!s:.60} is neither a text nor a list of token ids; generate_many takes several prompts"
        ) from None


def _encode_text(text: str, tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode(text)
    unknown = tokenizer.unknown_id
    if unknown in ids:
        characters = dict.fromkeys(text)
        missing = [each for each in characters if unknown in tokenizer.encode(each, add_special_tokens=False)]
        if missing and tokenizer.special_ids.issuperset(ids):
            raise ClearheadError(
                f"this model has no token for any character of {text[:40]!r}; give it a text with other characters"
            )
        if missing:
            names = ", ".join(map(repr, missing[:_MAX_CHARACTERS_LISTED]))
            names += ", …" * (len(missing) > _MAX_CHARACTERS_LISTED)
            warnings.warn(f"this model has no token for {names} and reads an unknown token instead", stacklevel=2)
    return ids


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer; raise ClearheadError if there is none."""
    if tokenizer is None:
        raise ClearheadError("this model has no tokenizer; give it token ids instead of text")
    return tokenizer


def pad_left(sequences: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return tokens and mask (B, T); the mask is None if all sequences have the same length."""
    length = max(len(sequence) for sequence in sequences)
    tokens = torch.tensor([[0] * (length - len(sequence)) + sequence for sequence in sequences], device=device)
    if all(len(sequence) == length for sequence in sequences):
        return tokens, None
    num_padding = torch.tensor([[length - len(sequence)] for sequence in sequences], device=device)
    return tokens, torch.arange(length, device=device)[None] >= num_padding


def pad_right(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens and mask (B, T)."""
    length = max(len(sequence) for sequence in sequences)
    tokens = torch.tensor([[*sequence, *[0] * (length - len(sequence))] for sequence in sequences], device=device)
    lengths = torch.tensor([[len(sequence)] for sequence in sequences], device=device)
    return tokens, torch.arange(length, device=device)[None] < lengths


@torch.inference_mode()
def encode_sources(network: Transformer, sources: Sequence[Sequence[int]]) -> EncoderOutput:
    """Run the encoder and precompute the keys and values of cross-attention; equal sources are read once."""
    distinct = list(dict.fromkeys(map(tuple, sources)))
    tokens, mask = pad_right(distinct, network.device)
    encoder_output = network.precompute_cross_attention(network.encode(tokens, mask))
    rows = [distinct.index(tuple(source)) for source in sources]
    return encoder_output.select(torch.tensor(rows, device=tokens.device))


@contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Turn an out-of-memory error into a one-line ClearheadError. The network keeps no state, so it stays usable."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        message = out_of_memory_message(error)
        if message is None:
            raise
        raise ClearheadError(message) from None
