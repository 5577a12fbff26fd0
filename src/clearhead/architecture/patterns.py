"""Attention patterns: which keys a query may attend to. model/masks.py turns them into masks.

SlidingWindow(size=4096)
"""

from dataclasses import dataclass

from clearhead.config import CheckedConfig


@dataclass(frozen=True, kw_only=True)
class Bidirectional:
    """A query attends to every token: encoders and cross-attention."""


@dataclass(frozen=True, kw_only=True)
class Causal:
    """A query attends to itself and to all earlier tokens."""


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(CheckedConfig):
    """A query attends to itself and to the size - 1 tokens before it."""

    size: int


@dataclass(frozen=True, kw_only=True)
class Chunked(CheckedConfig):
    """A query attends to itself and to the earlier tokens of its chunk of `size` tokens (Llama 4)."""

    size: int


@dataclass(frozen=True, kw_only=True)
class CenteredWindow(CheckedConfig):
    """A query attends to itself and to the tokens up to `reach` places before and after it (ModernBERT)."""

    reach: int


AttentionPattern = Bidirectional | Causal | SlidingWindow | Chunked | CenteredWindow
