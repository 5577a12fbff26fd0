"""Hidden states to the scores of labels, for each text or for each token.

classifier = ClassifierLayer(Classifier(num_labels=3, reads="first"), width=64); scores = classifier(h, mask, pooled)
"""

import torch
from torch import Tensor, nn

from clearhead.architecture import Classifier, HeadTransform
from clearhead.model.feed_forward import ACTIVATIONS
from clearhead.model.norms import build_norm


class HeadTransformLayer(nn.Module):
    """norm(activation(W x + b)), before the output matrix of a head."""

    def __init__(self, config: HeadTransform, width: int, output_width: int):
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.dense = nn.Linear(width, output_width, bias=config.bias)
        self.norm = build_norm(config.norm, output_width) if config.norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D of the output)."""
        return self.norm(self.activation(self.dense(x)))


class ClassifierLayer(nn.Module):
    """Compute the scores of labels."""

    def __init__(self, config: Classifier, width: int):
        super().__init__()
        self.config = config
        self.transform = HeadTransformLayer(config.transform, width, width) if config.transform else nn.Identity()
        self.scores = nn.Linear(width, config.num_labels, bias=config.bias)

    def forward(self, hidden_states: Tensor, mask: Tensor | None, pooled: Tensor | None) -> Tensor:
        """hidden_states (B, T, D), mask (B, T), pooled (B, D) -> scores (B, C), or (B, T, C) of tokens."""
        match self.config.reads:
            case "tokens":
                x = hidden_states
            case "pooled":
                assert pooled is not None
                x = pooled
            case "first":
                x = hidden_states[:, 0]
            case "last":
                x = hidden_states[torch.arange(len(hidden_states), device=hidden_states.device), _last(mask)]
            case "mean" if mask is None:
                x = hidden_states.mean(dim=1)
            case "mean":
                x = (hidden_states * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return self.scores(self.transform(x))


def _last(mask: Tensor | None) -> Tensor | int:
    """Return the index of the last real token of each sequence (B,); without padding, that of the last slot."""
    if mask is None:
        return -1
    steps = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask.bool(), steps, 0).amax(dim=1)
