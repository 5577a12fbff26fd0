"""Test activation patching."""

import pytest
import torch
from torch.nn.functional import log_softmax

from clearhead.api import Model
from clearhead.architecture import Rope
from clearhead.errors import ClearheadError
from clearhead.inspection import patch, patch_grid
from tests.inspection.toy_traces import OTHER, TOKENS, trace_toy
from tests.model.toys import assert_close, decoder, toy


@pytest.mark.parametrize("name", ["gpt2", "gemma-3-1b", "deepseek-v3", "t5-small"])
def test_patching_the_whole_residual_stream_restores_the_clean_prediction(name):
    clean = trace_toy(name)
    corrupted = Model(clean.network).trace(OTHER, clean.source_tokens)
    for layer in (0, clean.num_layers - 1):
        effect = patch(clean, corrupted, layer)
        assert_close(effect.after, log_softmax(clean.logits[-1].float(), dim=-1), 1e-5)
        assert_close(effect.before, log_softmax(corrupted.logits[-1].float(), dim=-1), 1e-5)
    assert patch(clean, corrupted, 0, patched_positions=[0, 1, 2]).divergence == pytest.approx(
        0.0, abs=1e-6
    )  # the texts are equal up to there
    assert_close(patch(clean, corrupted, 0, patched_positions=[3]).after, effect.after, 1e-5)  # the token that differs


def test_patching_one_head_replaces_its_output():
    """The expected logits are computed by hand through the output projection."""
    model = Model(toy(decoder(position=Rope())))
    clean, corrupted = model.trace(TOKENS), model.trace(OTHER)
    weights = corrupted.network.decoder.layers[1].attention.output.weight[:, 4:8]  # head 1
    outputs = [one.self_heads(1).compute().output[0, 1] @ weights.T for one in (clean, corrupted)]
    effect = patch(clean, corrupted, 1, patched_positions=[-1], head=1)
    block = model.network.decoder.layers[1]
    with torch.no_grad():
        middle = corrupted.residual_middle(1)[-1] + (outputs[0] - outputs[1])[-1]
        logits = corrupted.compute_logits(middle + block.feed_forward(block.feed_forward_residual.norm(middle)))
    assert_close(effect.after, log_softmax(logits.float(), dim=-1), 1e-5)
    assert effect.divergence > 1e-6


def test_patch_grid_finds_the_token_that_differs():
    model = Model(toy(decoder(position=Rope())))
    clean, corrupted = model.trace(TOKENS), model.trace(OTHER)
    gains = patch_grid(clean, corrupted, token=5)
    assert gains.shape == (2, 8)
    assert_close(gains[:, :3], torch.zeros(2, 3), 1e-6)  # the tokens before the difference are equal in both texts
    full_gain = patch(clean, corrupted, 0).gain(5)
    assert gains[0, 3].item() == pytest.approx(full_gain, abs=1e-5)
    assert patch(clean, corrupted, 1, [2], part="feed_forward").divergence == pytest.approx(0.0, abs=1e-6)


def test_patching_between_different_lengths_or_models_raises():
    model = Model(toy(decoder()))
    with pytest.raises(ClearheadError, match="8 and 3 tokens"):
        patch(model.trace(TOKENS), model.trace([1, 2, 3]), 0)
    with pytest.raises(ClearheadError, match="different models"):
        patch(model.trace(TOKENS), Model(toy(decoder())).trace(TOKENS), 0)
