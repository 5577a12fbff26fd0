"""Test entropy, previous-token, induction and specific scores and rollout on known weights, and on SmolLM2."""

import math
from dataclasses import replace

import pytest
import torch

import clearhead
from clearhead.api import Model
from clearhead.errors import ClearheadError
from clearhead.inspection import (
    attention_entropy,
    attention_rollout,
    induction_scores,
    logit_lens,
    patch,
    previous_token_scores,
    specific_scores,
)
from tests.inspection.toy_traces import SOURCE, TOKENS, trace_with_weights
from tests.model.toys import assert_close, decoder, encoder, toy, translator

THIRDS = [[1.0, 0, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]]
PREVIOUS = [[1.0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0.2, 0, 0.8, 0]]


def test_entropy_of_known_weights():
    expected = torch.tensor([0.0, math.log(2), math.log(3)])
    assert_close(attention_entropy(trace_with_weights(THIRDS), 0), expected.expand(4, 3), 1e-6)
    assert_close(attention_entropy(trace_with_weights(PREVIOUS), 1)[0, :3], torch.zeros(3), 1e-6)


def test_previous_token_scores_of_known_weights():
    for layer in previous_token_scores(trace_with_weights(PREVIOUS)):
        assert_close(layer, torch.full((4,), (1 + 1 + 0.8) / 3, dtype=torch.float64))
    with pytest.raises(ClearheadError, match="need at least two"):
        previous_token_scores(Model(toy(decoder())).trace([1]))


def test_specific_scores_of_known_weights():
    """Only the last two queries can choose between tokens: one attends to a token of its own, one to the first."""
    rows = [[1.0, 0, 0, 0, 0, 0]] * 4 + [[0, 0, 1.0, 0, 0, 0], [1.0, 0, 0, 0, 0, 0]]
    for layer in specific_scores(trace_with_weights(rows)):
        assert_close(layer, torch.full((4,), 0.25, dtype=torch.float64))  # the even spread has the other half of one
    with pytest.raises(ClearheadError, match="4 tokens are too few; specific_scores needs at least five"):
        specific_scores(trace_with_weights(PREVIOUS))


def test_induction_scores_of_known_weights():
    """In 7 1 2 7 1, induction attends from the second 7 to 1 (position 1) and from the second 1 to 2 (position 2)."""
    rows = torch.eye(5)
    rows[3] = torch.tensor([0.0, 0.6, 0, 0.4, 0])
    rows[4] = torch.tensor([0.0, 0, 1, 0, 0])
    traced = replace(trace_with_weights(rows.tolist()), tokens=[7, 1, 2, 7, 1])
    for layer in induction_scores(traced):
        assert_close(layer, torch.full((4,), 0.8, dtype=torch.float64), 1e-6)
    with pytest.raises(ClearheadError, match="no token occurs twice"):
        induction_scores(replace(traced, tokens=[0, 1, 2, 3, 4]))


def test_attention_rollout_of_two_layers():
    step = (torch.tensor(THIRDS) + torch.eye(3)) / 2
    rollout = attention_rollout(trace_with_weights(THIRDS))
    assert_close(rollout, step @ step, 1e-6)
    assert_close(rollout.sum(dim=1), torch.ones(3), 1e-6)
    source = attention_rollout(Model(toy(translator())).trace(TOKENS, SOURCE), stack="encoder")
    assert source.shape == (5, 5)


def test_attention_rollout_of_an_encoder_only_model():
    traced = Model(toy(encoder())).trace(TOKENS)
    assert attention_rollout(traced).shape == (8, 8)
    assert attention_rollout(traced)[0, -1] > 0


@pytest.mark.download
def test_patterns_in_smollm2(smollm2_gguf):
    """SmolLM2 has previous-token and induction heads, and decides on its answer in the upper half of its layers."""
    model = clearhead.load(smollm2_gguf)
    random_tokens = torch.randint(100, 40_000, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    repeated = model.trace([*random_tokens, *random_tokens])
    assert max(scores.max() for scores in induction_scores(repeated)) > 0.5
    assert max(scores.max() for scores in previous_token_scores(repeated)) > 0.5
    rome = model.encode(" Rome")[0]
    clean = model.trace("The capital of France is Paris, and the capital of Italy is")
    predictions = logit_lens(clean, top=1, positions=[-1])
    assert predictions[-1].top_ids.item() == rome
    assert predictions[9].top_ids.item() != rome
    corrupted = model.trace("The capital of France is Paris, and the capital of Spain is")
    assert patch(clean, corrupted, 1, patched_positions=[-2]).gain(rome) > 2
    assert abs(patch(clean, corrupted, 1, patched_positions=[3]).gain(rome)) < 1e-3
