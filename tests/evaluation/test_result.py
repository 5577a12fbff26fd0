"""Test means, ratios and their standard errors against NumPy and the bootstrap."""

import json
import math

import numpy as np
import pytest

from clearhead.errors import ClearheadError
from clearhead.evaluation.result import EvaluationResult, Metric, exponential_metric, mean_metric, ratio_metric


def test_mean_metric_has_the_standard_error_of_the_mean():
    values = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    metric = mean_metric("accuracy", values)
    assert metric.value == pytest.approx(np.mean(values))
    assert metric.standard_error == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)))


def test_ratio_metric_has_the_spread_of_resampled_ratios():
    """Use a thousand examples of unequal size."""
    random = np.random.default_rng(0)
    counts = random.integers(5, 50, 1000)
    sums = random.binomial(counts, 0.3) * 1.0
    metric = ratio_metric("error_rate", sums.tolist(), counts.tolist())
    assert metric.value == pytest.approx(sums.sum() / counts.sum())
    draws = random.integers(0, 1000, (2000, 1000))
    spread = (sums[draws].sum(axis=1) / counts[draws].sum(axis=1)).std()
    assert metric.standard_error == pytest.approx(spread, rel=0.06)


def test_one_example_has_no_standard_error():
    metric = exponential_metric("perplexity", mean_metric("nats", [2.0]))
    assert metric.value == pytest.approx(math.exp(2))
    assert metric.standard_error is None


def test_standard_error_of_an_exponential_metric():
    nats = ratio_metric("nats", [2.0, 2.2, 1.9], [1, 1, 1])
    metric = exponential_metric("perplexity", nats)
    above, below = math.exp(nats.value + nats.standard_error), math.exp(nats.value - nats.standard_error)
    assert metric.standard_error == pytest.approx((above - below) / 2, rel=0.01)


def test_as_dict_is_json():
    result = EvaluationResult("piqa", 4, (mean_metric("accuracy", [1, 0, 1, 1]),), {"shots": 0})
    data = json.loads(json.dumps(result.as_dict()))
    assert data["metrics"]["accuracy"]["value"] == result["accuracy"] == 0.75
    assert data["settings"] == {"shots": 0}


def test_an_overflowing_exponential_is_infinite():
    assert exponential_metric("perplexity", Metric("nats", 1000.0, None)).value == math.inf


def test_an_unknown_metric_raises():
    result = EvaluationResult("piqa", 2, (mean_metric("accuracy", [True, False]),), {})
    assert result["accuracy"] == 0.5
    with pytest.raises(ClearheadError, match="did you mean 'accuracy'"):
        result["acuracy"]
