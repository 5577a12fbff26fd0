"""Lower what changes attention scores by position: tables of biases by distance, and of temperatures by position.

biases = score_biases(config, relative_bias, length=512); temperatures = score_temperatures(config, length=512)
"""

import torch
from torch import Tensor, nn

from clearhead.architecture import Alibi, GroupedAttention, RelativeBuckets
from clearhead.model import Attention, alibi_bias, relative_position_bucket, temperature_factors


def find_relative_bias(attention: Attention, shared: nn.Module | None) -> nn.Embedding | None:
    """Return the table of biases of T5's buckets (num_buckets, N): the layer's own or that of its stack; else None."""
    if not isinstance(attention.config.position, RelativeBuckets):
        return None
    table = shared if attention.relative_bias is None else attention.relative_bias
    assert isinstance(table, nn.Embedding)
    return table


def score_biases(config: GroupedAttention, relative_bias: nn.Embedding | None, length: int) -> Tensor:
    """Return what is added to the scores (N, length) in float32, from distance length - 1 down to 0."""
    distances = torch.arange(length - 1, -1, -1)[None, None]  # (1, 1, length)
    match config.position:
        case Alibi() as alibi:
            return alibi_bias(distances, config.num_heads, alibi, torch.float32)[0, :, 0].contiguous()
        case RelativeBuckets() as buckets:
            assert relative_bias is not None
            rows = relative_bias.weight.detach()[relative_position_bucket(distances, buckets)[0, 0]]
            return rows.float().T.contiguous()
    raise AssertionError(f"{type(config.position).__name__} positions add no bias")


def bucket_table(config: RelativeBuckets, device: torch.device | None = None) -> Tensor:
    """Return T5's bucket of every distance from -max_distance to max_distance (2 max_distance + 1,), as int32.

    Distances beyond max_distance have the bucket of max_distance itself.
    """
    distances = torch.arange(-config.max_distance, config.max_distance + 1)[None, None]
    return relative_position_bucket(distances, config)[0, 0].int().to(device)


def has_bias(config: GroupedAttention) -> bool:
    """Return whether the positions of an attention layer are a bias on its scores."""
    return isinstance(config.position, Alibi | RelativeBuckets)


def score_temperatures(config: GroupedAttention, length: int) -> Tensor:
    """Return the factors on the queries or scores of the positions 0 to length - 1 (length,) in float32."""
    assert config.temperature is not None
    return temperature_factors(config.temperature, torch.arange(length)[None], torch.float32)[0]
