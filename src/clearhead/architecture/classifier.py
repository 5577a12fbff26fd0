"""Config of a classification head: hidden states to the scores of labels.

Classifier(num_labels=3, reads="first", transform=HeadTransform(activation="tanh"))
"""

from dataclasses import dataclass
from typing import Literal

from clearhead.architecture.feed_forward import Activation
from clearhead.architecture.norms import Norm
from clearhead.config import CheckedConfig
from clearhead.errors import require


@dataclass(frozen=True, kw_only=True)
class HeadTransform(CheckedConfig):
    """norm(activation(W h + b)), applied to hidden states before the logits or the scores of labels (BERT)."""

    activation: Activation
    norm: Norm | None = None
    bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.activation != "xielu",
            "xielu has learned parameters of its own, which a HeadTransform does not have; use another activation",
        )


@dataclass(frozen=True, kw_only=True)
class Classifier(CheckedConfig):
    """W transform(h) + b, a score for each label: of each token, or of the whole text.

    For a text, h is the hidden state of the `first` or `last` token, the `mean` of all tokens, or the output of the
    model's pooler (`pooled`).
    """

    num_labels: int
    reads: Literal["tokens", "first", "last", "mean", "pooled"]
    transform: HeadTransform | None = None
    bias: bool = True
