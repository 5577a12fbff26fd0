"""Test the logit lens."""

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.inspection import logit_lens
from tests.inspection.toy_traces import trace_toy
from tests.model.toys import assert_close


@pytest.mark.parametrize("name", ["gpt2", "gemma-3-1b", "palm-540b", "t5-small", "bert-base"])
def test_the_last_prediction_is_that_of_the_model(name):
    traced = trace_toy(name)
    predictions = logit_lens(traced, top=3)
    assert [(one.layer, one.after) for one in predictions[-2:]] == [
        (traced.num_layers - 1, "attention"),
        (traced.num_layers - 1, "feed_forward"),
    ]
    expected = traced.logits.float().softmax(dim=-1).topk(3)
    assert torch.equal(predictions[-1].top_ids, expected.indices)
    assert_close(predictions[-1].top_probabilities, expected.values, 1e-6)
    middle = traced.compute_logits(traced.residual_middle(1)).float().softmax(dim=-1)
    assert_close(predictions[2].top_probabilities, middle.topk(3).values, 1e-6)
    assert_close(predictions[2].entropy, -(middle * middle.log()).sum(dim=-1), 1e-5)


def test_the_lens_always_includes_the_last_layer():
    traced = trace_toy("gpt2")
    assert traced.num_layers == 3
    for every, layers in {1: [0, 1, 2], 2: [0, 2], 3: [2], 100: [2]}.items():
        assert [one.layer for one in logit_lens(traced, every=every, positions=[-1])] == [
            layer for layer in layers for _ in range(2)
        ]
    assert logit_lens(traced, top=2, positions=[-1, 0])[0].top_ids.shape == (2, 2)
    assert logit_lens(traced, top=2, positions=[])[0].top_ids.shape == (0, 2)
    for wrong in ({"top": 0}, {"top": 30}, {"every": 0}, {"positions": [8]}):
        with pytest.raises(ClearheadError):
            logit_lens(traced, **wrong)
