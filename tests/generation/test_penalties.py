"""The repetition penalty equals transformers', the other two the formula of OpenAI's documentation."""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from clearhead.generation.penalties import TokenCounts, penalize_frequency, penalize_presence, penalize_repetition

V = 11
PROMPTS = [[1, 2, 2, 5], [7, 7, 7, 7], [0, 3, 4, 10]]
OUTPUTS = [[2, 9], [8, 8], [0, 1]]


@pytest.fixture
def counts() -> TokenCounts:
    return TokenCounts.of(PROMPTS, OUTPUTS, V)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 5.0])
def test_repetition_equals_transformers(penalty, counts, generator):
    logits = torch.randn(3, V, generator=generator) * 4
    logits[0, 2] = 0.0
    whole = torch.tensor([prompt + output for prompt, output in zip(PROMPTS, OUTPUTS, strict=True)])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(whole, logits)
    assert torch.equal(penalize_repetition(logits, counts.seen, torch.full((3, 1), penalty)), expected)


def test_presence_and_frequency_follow_the_formula(counts, generator):
    """mu[j] - c[j] · alpha_frequency - float(c[j] > 0) · alpha_presence; c counts sampled tokens."""
    logits = torch.randn(3, V, generator=generator)
    frequency, presence = torch.tensor([[0.5], [-1.5], [0.0]]), torch.tensor([[0.25], [2.0], [-1.0]])
    result = penalize_presence(penalize_frequency(logits, counts.output, frequency), counts.output, presence)
    for row in range(3):
        for token in range(V):
            c = OUTPUTS[row].count(token)
            expected = logits[row, token] - c * frequency[row] - float(c > 0) * presence[row]
            assert result[row, token] == expected


def test_counts(counts):
    for row in range(3):
        for token in range(V):
            assert counts.prompt[row, token] == PROMPTS[row].count(token)
            assert counts.output[row, token] == OUTPUTS[row].count(token)
            assert counts.seen[row, token] == (token in PROMPTS[row] + OUTPUTS[row])


def test_adding_a_token_is_counting_anew(counts):
    added = counts.add(torch.tensor([2, 8, 6]))
    again = TokenCounts.of(PROMPTS, [[2, 9, 2], [8, 8, 8], [0, 1, 6]], V)
    assert torch.equal(added.output, again.output)
    assert torch.equal(added.prompt, again.prompt)
    assert counts.output[0, 2] == 1


def test_ids_without_a_logit_and_empty_rows_count_nothing():
    counts = TokenCounts.of([[V, V + 3, 1], []], [[], []], V)
    assert counts.prompt.sum(dim=1).tolist() == [1, 0]
    assert counts.output.shape == (2, V)
