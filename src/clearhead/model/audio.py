"""Mel bands to vectors at the start of the encoder of a speech model (Radford et al. 2022, §2.2).

    embedding = AudioEmbeddingLayer(AudioEmbedding(num_mel_bands=80, num_positions=1500), width=64, dropout=0.0)
    x = embedding(features, places)                                          # (B, 80, 3000) -> (B, 1500, 64)

    features (B, M, 2T) ── convolution, width 3 ── gelu ── convolution, width 3, stride 2 ── gelu ── + positions
                                  (B, D, 2T)                        (B, D, T)

Both convolutions are padded with one frame of zeros on either side. A place is one of the T vectors; each stands for
two frames.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.architecture import AudioEmbedding, Embedding, SinusoidalPositions
from clearhead.errors import ClearheadError
from clearhead.model.embedding import TokenEmbedding
from clearhead.model.positions import sinusoids

_POSITIONS = SinusoidalPositions(layout="halves_to_end")


class AudioEmbeddingLayer(nn.Module):
    """Embed mel bands. The table of sinusoids is stored, because checkpoints hold it in their own precision."""

    def __init__(self, config: AudioEmbedding, width: int, dropout: float):
        super().__init__()
        self.config = config
        self.convolution = nn.Conv1d(config.num_mel_bands, width, kernel_size=3, padding=1)
        self.strided = nn.Conv1d(width, width, kernel_size=3, stride=2, padding=1)
        table = sinusoids(torch.arange(config.num_positions), width, _POSITIONS, torch.float32)
        self.positions = nn.Parameter(table.to(torch.get_default_dtype()), requires_grad=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor, positions: Tensor, token_types: Tensor | None = None) -> Tensor:
        """features (B, M, 2T), in any precision -> (B, T, D). The positions are always 0 to T - 1."""
        x = functional.gelu(self.convolution(features.to(self.positions.dtype)))
        x = functional.gelu(self.strided(x)).transpose(1, 2)
        return self.dropout(x + self.positions)

    def places(self, features: Tensor) -> Tensor:
        """Return one entry for each vector that the features become, (B, T)."""
        return features[:, 0, ::2]

    def check_inputs(self, features: Tensor, **others: Tensor | None) -> None:
        """Raise ClearheadError unless these are features of the length that the model reads, and nothing else."""
        given = next((name for name, tensor in others.items() if tensor is not None), None)
        if given is not None:
            raise ClearheadError(f"an encoder that reads audio has no {given}; leave it out")
        bands, frames = self.config.num_mel_bands, 2 * self.config.num_positions
        if features.ndim != 3 or features.shape[0] == 0 or features.shape[1:] != (bands, frames):
            raise ClearheadError(
                f"the audio features have shape {tuple(features.shape)}; it must be (batch, {bands}, {frames}): mel "
                "bands and frames"
            )
        if not features.is_floating_point():
            raise ClearheadError(f"audio features must be floating-point numbers, not {features.dtype}")

    def check_ranges(self, features: Tensor, positions: Tensor, token_types: Tensor | None) -> None:
        """Check nothing: every number is a possible feature."""


def build_embedding(
    config: Embedding | AudioEmbedding, width: int, dropout: float, table: nn.Embedding | None = None
) -> TokenEmbedding | AudioEmbeddingLayer:
    """Return the module at the start of a stack. `table` is an existing token table to share."""
    match config:
        case AudioEmbedding():
            return AudioEmbeddingLayer(config, width, dropout)
        case Embedding():
            return TokenEmbedding(config, width, dropout, table)
