"""The repetition penalty equals that of transformers; the other two follow the formula in OpenAI's documentation."""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from clearhead.sampling.penalties import TokenCounts, penalize_frequency, penalize_presence, penalize_repetition

V = 11
PROMPTS = [[1, 2, 2, 5], [7, 7, 7, 7], [0, 3, 4, 10]]
OUTPUTS = [[2, 9], [8, 8], [0, 1]]


@pytest.fixture
def counts() -> TokenCounts:
    return TokenCounts.from_tokens(PROMPTS, OUTPUTS, V)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 5.0])
def test_the_repetition_penalty_equals_transformers(penalty, counts, generator):
    logits = torch.randn(3, V, generator=generator) * 4
    logits[0, 2] = 0.0
    whole = torch.tensor([prompt + output for prompt, output in zip(PROMPTS, OUTPUTS, strict=True)])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(whole, logits)
    assert torch.equal(penalize_repetition(logits, counts.seen, torch.full((3, 1), penalty)), expected)


def test_presence_and_frequency_penalties_follow_the_formula(counts, generator):
    """mu[j] - c[j] · alpha_frequency - float(c[j] > 0) · alpha_presence; c counts sampled tokens."""
    logits = torch.randn(3, V, generator=generator)
    frequency, presence = torch.tensor([[0.5], [-1.5], [0.0]]), torch.tensor([[0.25], [2.0], [-1.0]])
    result = penalize_presence(penalize_frequency(logits, counts.output, frequency), counts.output, presence)
    for row in range(3):
        for token in range(V):
            c = OUTPUTS[row].count(token)
            expected = logits[row, token] - c * frequency[row] - float(c > 0) * presence[row]
            assert result[row, token] == expected


def test_counts_of_prompt_and_output(counts):
    for row in range(3):
        for token in range(V):
            assert counts.prompt[row, token] == PROMPTS[row].count(token)
            assert counts.output[row, token] == OUTPUTS[row].count(token)
            assert counts.seen[row, token] == (token in PROMPTS[row] + OUTPUTS[row])


def test_add_equals_counting_all_tokens_again(counts):
    added = counts.add(torch.tensor([2, 8, 6]))
    again = TokenCounts.from_tokens(PROMPTS, [[2, 9, 2], [8, 8, 8], [0, 1, 6]], V)
    assert torch.equal(added.output, again.output)
    assert torch.equal(added.prompt, again.prompt)
    assert counts.output[0, 2] == 1


def test_ids_outside_the_vocabulary_and_empty_sequences_are_not_counted():
    counts = TokenCounts.from_tokens([[V, V + 3, 1], []], [[], []], V)
    assert counts.prompt.sum(dim=1).tolist() == [1, 0]
    assert counts.output.shape == (2, V)
