"""Token ids to vectors at the start of a forward pass, and vectors to logits at its end (book C2).

    embedding = TokenEmbedding(config.decoder.embedding, width=64, dropout=0.0); x = embedding(tokens, positions)

Parts that a config does not have are left out. A tied head uses the token table as W.

    x      = projection(dropout(norm(tokens[id] · scale + types[type] + positions[position])))
    logits = softcap(transform(h) · scale · Wᵀ + bias)
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.architecture import Embedding, Head, LearnedPositions, SinusoidalPositions
from clearhead.errors import ClearheadError
from clearhead.model.attend import apply_softcap
from clearhead.model.classifier import HeadTransformLayer
from clearhead.model.norms import build_norm
from clearhead.model.positions import sinusoids


def empty_embedding(num_rows: int, width: int) -> nn.Embedding:
    """Return an uninitialized table (num_rows, width), to be filled by initialize.py or from a checkpoint.

    nn.Embedding's own initialization on the meta device imports PyTorch's compiler, which takes 3 s.
    """
    return nn.Embedding.from_pretrained(torch.empty(num_rows, width), freeze=False)


class TokenEmbedding(nn.Module):
    """Embed tokens, token types and positions. `table` is an existing token table to share."""

    def __init__(self, config: Embedding, width: int, dropout: float, table: nn.Embedding | None = None):
        super().__init__()
        self.config = config
        self.projection = nn.Identity() if config.width is None else nn.Linear(config.width, width)
        width = config.width or width
        self.tokens = table or empty_embedding(config.vocab_size, width)
        learned = config.positions if isinstance(config.positions, LearnedPositions) else None
        self.positions = empty_embedding(learned.num_positions + learned.offset, width) if learned else None
        self.types = empty_embedding(config.num_token_types, width) if config.num_token_types else None
        self.norm = build_norm(config.norm, width) if config.norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, positions: Tensor, token_types: Tensor | None = None) -> Tensor:
        """tokens (B, T), positions (B or 1, T), token_types (B, T), None for all 0 -> (B, T, D)."""
        x = self.tokens(tokens)
        if self.config.scale != 1.0:
            # The scale is first rounded to the model's precision: in bfloat16 Gemma's √3072 is 55.5.
            x = x * x.new_full((), self.config.scale)
        return self.finish(x, positions, token_types)

    def finish(self, x: Tensor, positions: Tensor, token_types: Tensor | None = None) -> Tensor:
        """Add to scaled rows of the token table (B, T, width of the table) all other parts: (B, T, D)."""
        if self.types is not None:
            x = x + self.types(x.new_zeros(x.shape[:-1], dtype=torch.long) if token_types is None else token_types)
        match self.config.positions:
            case LearnedPositions(offset=offset):
                assert self.positions is not None
                x = x + self.positions(positions + offset)
            case SinusoidalPositions() as config:
                x = x + sinusoids(positions, x.shape[-1], config, x.dtype)
        return self.projection(self.dropout(self.norm(x)))

    def places(self, tokens: Tensor) -> Tensor:
        """Return one entry for each vector that the tokens become: the tokens themselves, (B, T)."""
        return tokens

    def check_inputs(self, tokens: Tensor, **others: Tensor | None) -> None:
        """Raise ClearheadError unless tokens are integers (B, T) and the other inputs have their shape."""
        check_shapes(tokens, **others)

    def check_ranges(self, tokens: Tensor, positions: Tensor, token_types: Tensor | None) -> None:
        """Raise ClearheadError if a table has no row for an id, instead of an index error inside PyTorch."""
        check_range("token id", tokens, self.config.vocab_size)
        if isinstance(self.config.positions, LearnedPositions):
            check_range("position", positions, self.config.positions.num_positions)
        if token_types is not None:
            if not self.config.num_token_types:
                raise ClearheadError("this model has no token types; leave out token_types")
            check_range("token type", token_types, self.config.num_token_types)


def check_range(name: str, values: Tensor, limit: int) -> None:
    """Raise ClearheadError unless 0 <= values < limit."""
    smallest, largest = values.min().item(), values.max().item()
    if smallest < 0 or largest >= limit:
        invalid = smallest if smallest < 0 else largest
        raise ClearheadError(f"{name} {invalid} is out of range: this model has {limit}, from 0 to {limit - 1}")


def check_shapes(tokens: Tensor, **others: Tensor | None) -> None:
    """Raise ClearheadError unless tokens are integers (B, T) and the other inputs have their shape."""
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise ClearheadError(f"tokens has shape {tuple(tokens.shape)}; it must be (batch, length), and not empty")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ClearheadError(f"tokens must be int64 or int32, not {tokens.dtype}")
    for name, tensor in others.items():
        is_shared = name == "position_ids" and tensor is not None and tensor.shape == (1, tokens.shape[1])
        if tensor is not None and tensor.shape != tokens.shape and not is_shared:
            raise ClearheadError(
                f"{name} has shape {tuple(tensor.shape)}; it must have that of tokens, {tuple(tokens.shape)}"
            )


class LogitHead(nn.Module):
    """Compute logits from hidden states."""

    def __init__(self, config: Head, vocab_size: int, width: int, table_width: int):
        super().__init__()
        self.config = config
        self.transform = HeadTransformLayer(config.transform, width, table_width) if config.transform else nn.Identity()
        self.weight = None if config.tied else nn.Parameter(torch.empty(vocab_size, table_width))
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if config.bias else None

    def forward(self, x: Tensor, token_table: Tensor) -> Tensor:
        """x (B, T, D), token_table (V, D), which a tied head uses as its matrix -> logits (B, T, V)."""
        logits = functional.linear(self.features(x), self.output_matrix(token_table), self.bias)
        return apply_softcap(logits, self.config.softcap)

    def features(self, x: Tensor) -> Tensor:
        """Return what the output matrix multiplies: transform(x) · scale, (B, T, D)."""
        x = self.transform(x)
        return x if self.config.scale == 1.0 else x * self.config.scale

    def output_matrix(self, token_table: Tensor) -> Tensor:
        """Return the output matrix (V, D): the head's own, or the token table if tied."""
        return token_table if self.weight is None else self.weight
