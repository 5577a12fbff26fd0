"""Ids to vectors at the bottom, vectors to logits at the top (book C2).

embedding = TokenEmbedding(config.decoder.embedding, width=64, dropout=0.0); x = embedding(tokens, positions)
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.architecture import Embedding, Head, LearnedPositions, SinusoidalPositions
from clearhead.errors import ClearheadError
from clearhead.model.attend import softcap_scores
from clearhead.model.feed_forward import ACTIVATIONS
from clearhead.model.norms import build_norm
from clearhead.model.positions import sinusoids


def blank_table(num_rows: int, width: int) -> nn.Embedding:
    """For initialize.py or a checkpoint to fill; PyTorch's own draw would load its compiler, for 3 s, on meta."""
    return nn.Embedding.from_pretrained(torch.empty(num_rows, width), freeze=False)


class TokenEmbedding(nn.Module):
    def __init__(self, config: Embedding, width: int, dropout: float, table: nn.Embedding | None = None):
        super().__init__()
        self.config = config
        self.tokens = table or blank_table(config.vocab_size, width)
        learned = config.positions if isinstance(config.positions, LearnedPositions) else None
        self.positions = blank_table(learned.num_positions + learned.offset, width) if learned else None
        self.types = blank_table(config.num_token_types, width) if config.num_token_types else None
        self.norm = build_norm(config.norm, width) if config.norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, positions: Tensor, token_types: Tensor | None = None) -> Tensor:
        """tokens (B, T), positions (B or 1, T) -> (B, T, D)."""
        x = self.tokens(tokens)
        if self.config.scale != 1.0:
            # Rounded to the model's precision first: in bfloat16 Gemma's √3072 is 55.5.
            x = x * x.new_full((), self.config.scale)
        if self.types is not None:
            x = x + self.types(torch.zeros_like(tokens) if token_types is None else token_types)
        match self.config.positions:
            case LearnedPositions(offset=offset):
                assert self.positions is not None
                x = x + self.positions(positions + offset)
            case SinusoidalPositions() as config:
                x = x + sinusoids(positions, x.shape[-1], config, x.dtype)
        return self.dropout(self.norm(x))

    def check(self, tokens: Tensor, positions: Tensor, token_types: Tensor | None) -> None:
        """Ids and positions this table has; one clear sentence before an index error deep inside."""
        check_range("token id", tokens, self.config.vocab_size)
        if isinstance(self.config.positions, LearnedPositions):
            check_range("position", positions, self.config.positions.num_positions)
        if token_types is not None:
            if not self.config.num_token_types:
                raise ClearheadError("token_types were given, but this model has none")
            check_range("token type", token_types, self.config.num_token_types)


def check_range(what: str, values: Tensor, limit: int) -> None:
    smallest, largest = values.min().item(), values.max().item()
    if smallest < 0 or largest >= limit:
        wrong = smallest if smallest < 0 else largest
        raise ClearheadError(f"{what} {wrong} is out of range: this model has {limit}, from 0 to {limit - 1}")


class LogitHead(nn.Module):
    def __init__(self, config: Head, vocab_size: int, width: int):
        super().__init__()
        self.config = config
        self.transform = HeadTransformLayer(config, width) if config.transform else nn.Identity()
        self.weight = None if config.tied else nn.Parameter(torch.empty(vocab_size, width))
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if config.bias else None

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """x (B, T, D), table (V, D) the token table, used where tied -> (B, T, V)."""
        logits = functional.linear(self.features(x), self.matrix(table), self.bias)
        return softcap_scores(logits, self.config.softcap)

    def features(self, x: Tensor) -> Tensor:
        """What the matrix multiplies."""
        x = self.transform(x)
        return x if self.config.scale == 1.0 else x * self.config.scale

    def matrix(self, table: Tensor) -> Tensor:
        return table if self.weight is None else self.weight


class HeadTransformLayer(nn.Module):
    def __init__(self, config: Head, width: int):
        super().__init__()
        assert config.transform is not None
        self.activation = ACTIVATIONS[config.transform.activation]
        self.dense = nn.Linear(width, width)
        self.norm = build_norm(config.transform.norm, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(x)))
