"""Hidden states to one vector per text, as the modules of the sentence-transformers library compute it.

    pooler = SentencePooler(SentenceConfig()); vectors = pooler(hidden_states, mask)   # (B, T, D) -> (B, E)

Formulas: Reimers & Gurevych 2019, §3 (cls, mean, max); Muennighoff 2022, §3 (weighted mean, last token).
"""

from collections.abc import Callable
from typing import assert_never

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.architecture import Normalize, Pooling, Projection, SentenceConfig, SentenceStep, VectorNorm
from clearhead.errors import ClearheadError

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}
_SMALLEST_NORM = 1e-12  # the vector 0 stays 0


class SentencePooler(nn.Module):
    """Pool the hidden states of each text, then apply the steps of the config."""

    def __init__(self, config: SentenceConfig):
        super().__init__()
        self.config = config
        self.steps = nn.ModuleList(_build_step(step) for step in config.steps)

    def forward(self, hidden_states: Tensor, mask: Tensor, num_prompt_tokens: int = 0) -> Tensor:
        """hidden_states (B, T, D), mask (B, T), False for padding -> (B, E).

        num_prompt_tokens: number of tokens of the prompt at the start of each text.
        """
        if self.config.unsupported is not None:
            raise ClearheadError(f"this model embeds texts with {self.config.unsupported}, which is not supported")
        pooling = self.config.pooling
        if not pooling.include_prompt and num_prompt_tokens:
            mask = mask.clone()
            mask[:, :num_prompt_tokens] = False
        vectors = _pool_tokens(hidden_states, mask, pooling)
        for step in self.steps:
            vectors = step(vectors)
        return vectors[:, : self.config.dimensions]


def _pool_tokens(hidden_states: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Return one vector per text: hidden_states (B, T, D), mask (B, T) -> (B, D · number of modes)."""
    weights = mask[..., None].to(hidden_states.dtype)
    return torch.cat([_pool(hidden_states, mask, weights, mode) for mode in pooling.modes], dim=-1)


def _pool(hidden_states: Tensor, mask: Tensor, weights: Tensor, mode: str) -> Tensor:
    match mode:
        case "cls":
            return hidden_states[:, 0]
        case "max":
            return hidden_states.masked_fill(~mask[..., None], -1e9).amax(dim=1)
        case "last":
            steps = torch.arange(mask.shape[1], device=mask.device)
            last = torch.where(mask, steps, 0).amax(dim=1)
            return hidden_states[torch.arange(len(last), device=last.device), last]
        case "weighted_mean":
            steps = torch.arange(1, mask.shape[1] + 1, device=mask.device)
            weights = weights * steps[None, :, None].to(weights.dtype)
    total, count = (hidden_states * weights).sum(dim=1), weights.sum(dim=1).clamp(min=1e-9)
    return total / (count.sqrt() if mode == "mean_sqrt_len" else count)


class _ProjectionLayer(nn.Module):
    """activation(W x + b)."""

    def __init__(self, config: Projection):
        super().__init__()
        self.activation = _ACTIVATIONS[config.activation]
        self.linear = nn.Linear(config.input_width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, E) -> (B, E of the output)."""
        return self.activation(self.linear(x))


class _NormalizeLayer(nn.Module):
    """Scale each vector to length 1."""

    def forward(self, x: Tensor) -> Tensor:
        """x (B, E) -> (B, E)."""
        return functional.normalize(x, dim=-1, eps=_SMALLEST_NORM)


def _build_step(config: SentenceStep) -> nn.Module:
    match config:
        case Projection():
            return _ProjectionLayer(config)
        case VectorNorm():
            return nn.LayerNorm(config.width, eps=config.epsilon)
        case Normalize():
            return _NormalizeLayer()
        case _:
            assert_never(config)
