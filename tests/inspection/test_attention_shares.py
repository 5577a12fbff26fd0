"""Test the shares of attention patterns on matrices whose shares are known."""

import pytest
import torch

from clearhead.inspection.shares import attention_shares

LENGTH = 12
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def shares_of(weights, allowed=CAUSAL, is_self_attention=True):
    shares = attention_shares(weights[None], allowed, is_self_attention)
    return {name: float(values[0]) for name, values in shares.patterns.items()}


def one_key(offset):
    """Return weights that attend to the token at a distance, or to the first token where there is none."""
    weights = torch.zeros(LENGTH, LENGTH)
    queries = torch.arange(LENGTH)
    weights[queries, (queries - offset).clamp(min=0)] = 1.0
    return weights


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("first token", one_key(LENGTH)),
        ("itself", one_key(0)),
        ("previous token", one_key(1)),
        ("next token", torch.eye(LENGTH).roll(1, dims=1)),
    ],
)
def test_a_trivial_head_has_one_share(name, weights):
    allowed = torch.ones_like(CAUSAL) if name == "next token" else CAUSAL
    shares = shares_of(weights, allowed)
    assert shares.pop("specific") == 0
    assert shares[name] > 0.9


def test_a_uniform_head_is_no_more_than_its_patterns_and_an_even_spread():
    weights = CAUSAL / CAUSAL.sum(dim=1, keepdim=True)
    shares = shares_of(weights)
    assert shares["specific"] == pytest.approx(0, abs=1e-12)
    assert shares["common tokens"] == pytest.approx(0, abs=1e-12)
    assert shares["even spread"] > 0.4
    assert sum(shares.values()) == pytest.approx(1)


def test_a_token_that_attracts_every_query_is_common_and_not_specific():
    weights = one_key(LENGTH)
    weights[5:] = torch.eye(LENGTH)[3]
    shares = shares_of(weights)
    assert shares["specific"] < 0.1
    assert shares["common tokens"] > 0.4


def test_tokens_of_its_own_for_each_query_are_specific():
    shares = shares_of(one_key(4))
    assert shares["specific"] > 0.6
    assert sum(shares.values()) == pytest.approx(1)


def test_the_strongest_cell_is_the_largest_specific_weight():
    weights = one_key(LENGTH)
    weights[9] = 0.2 * torch.eye(LENGTH)[0] + 0.8 * torch.eye(LENGTH)[4]
    assert attention_shares(weights[None], CAUSAL, True).strongest_cells == [(9, 4)]


def test_cross_attention_has_no_neighbors_but_a_first_and_a_last_token():
    weights = torch.full((5, 7), 1 / 7)
    assert set(shares_of(weights, None, is_self_attention=False)) == {
        "first token",
        "last token",
        "even spread",
        "common tokens",
        "specific",
    }


def test_a_short_text_has_no_shares():
    assert attention_shares(torch.eye(3)[None], torch.ones(3, 3, dtype=torch.bool).tril(), True) is None


def test_weights_that_are_not_finite_count_as_zero():
    weights = one_key(4)
    weights[7] = torch.nan
    assert 0 < shares_of(weights)["specific"] < 1
