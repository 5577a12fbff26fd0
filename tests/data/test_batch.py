"""What flows from data to training."""

import torch
from torch.nn.functional import cross_entropy

from clearhead.data.batch import IGNORED, Batch


def test_targets_are_counted_without_the_ignored():
    batch = Batch(tokens=torch.zeros(2, 3, dtype=torch.long), targets=torch.tensor([[1, 2, IGNORED], [IGNORED, 0, 5]]))
    assert batch.num_targets == 4


def test_torch_ignores_what_is_ignored():
    logits = torch.randn(3, 4)
    whole = cross_entropy(logits, torch.tensor([1, IGNORED, 2]), reduction="sum")
    torch.testing.assert_close(whole, cross_entropy(logits[[0, 2]], torch.tensor([1, 2]), reduction="sum"))


def test_all_parts_move_to_a_device():
    part = torch.zeros(1, 2, dtype=torch.long)
    moved = Batch(part, part, mask=part.bool(), source=part).to("meta")
    assert moved.tokens.device.type == moved.targets.device.type == "meta"
    assert moved.mask.device.type == moved.source.device.type == "meta"
    assert moved.documents is None
