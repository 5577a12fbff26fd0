"""Hold one batch: the inputs and targets that training reads.

batch = Batch(tokens=ids[:, :-1], targets=ids[:, 1:])   # a language model predicts the next token
loss = cross_entropy(network(batch.tokens), batch.targets, ignore_index=IGNORED)
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

IGNORED = -100  # the default ignore_index of torch.nn.functional.cross_entropy


@dataclass(frozen=True)
class Batch:
    """B rows of T decoder tokens, with S encoder tokens each if the network has an encoder and a decoder."""

    tokens: Tensor  # (B, T) input of the decoder, or of the only stack
    targets: Tensor  # (B, T) the token to predict at each position; IGNORED where there is no target
    mask: Tensor | None = None  # (B, T) True for real tokens; None if there is no padding
    documents: Tensor | None = None  # (B, T) index of the packed document, for the document mask
    positions: Tensor | None = None  # (B, T) position within the packed document
    source: Tensor | None = None  # (B, S) input of the encoder
    source_mask: Tensor | None = None  # (B, S) True for real tokens; None if there is no padding

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch with all its tensors on a device."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None})

    @property
    def real_tokens(self) -> Tensor | None:
        """(B, T) mask of the tokens that come from a text; None if all do.

        In packed rows every token has a target except the filler at the end, so the targets show which are real.
        """
        return self.mask if self.documents is None else self.targets != IGNORED

    @property
    def num_targets(self) -> int:
        """Number of targets."""
        return int((self.targets != IGNORED).sum())

    @property
    def num_losses(self) -> int:
        """Number of losses: the divisor that turns a summed loss into a mean. Each target has one."""
        return self.num_targets


class PreferenceBatch(Batch):
    """Pairs of rows: the row 2n is the preferred answer to a prompt, the row 2n + 1 another answer to it."""

    @property
    def has_loss(self) -> Tensor:
        """(B / 2,) True for pairs with targets in both rows."""
        return (self.targets != IGNORED).any(dim=1).view(-1, 2).all(dim=1)

    @property
    def num_losses(self) -> int:
        """Number of losses. Each pair has one."""
        return int(self.has_loss.sum())
