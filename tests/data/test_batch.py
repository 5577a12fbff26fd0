"""Test the Batch dataclass."""

import torch
from torch.nn.functional import cross_entropy

from clearhead.data.batch import IGNORED, Batch


def test_num_targets_does_not_count_ignored_positions():
    batch = Batch(tokens=torch.zeros(2, 3, dtype=torch.long), targets=torch.tensor([[1, 2, IGNORED], [IGNORED, 0, 5]]))
    assert batch.num_targets == 4


def test_torch_cross_entropy_skips_ignored_targets():
    logits = torch.randn(3, 4)
    total = cross_entropy(logits, torch.tensor([1, IGNORED, 2]), reduction="sum")
    torch.testing.assert_close(total, cross_entropy(logits[[0, 2]], torch.tensor([1, 2]), reduction="sum"))


def test_to_moves_all_tensors_to_a_device():
    ids = torch.zeros(1, 2, dtype=torch.long)
    moved = Batch(ids, ids, mask=ids.bool(), source=ids).to("meta")
    assert moved.tokens.device.type == moved.targets.device.type == "meta"
    assert moved.mask.device.type == moved.source.device.type == "meta"
    assert moved.documents is None
