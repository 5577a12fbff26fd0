"""Means, rates and their standard errors, against numpy and the bootstrap."""

import json
import math

import numpy as np
import pytest

from clearhead.errors import ClearheadError
from clearhead.evaluation.result import Measure, Result, exponential, measure, rate


def test_a_mean_and_its_standard_error():
    values = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    found = measure("accuracy", values)
    assert found.value == pytest.approx(np.mean(values))
    assert found.standard_error == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)))


def test_a_rate_weighs_examples_by_their_size():
    """Its standard error is the spread of the rate over resampled examples, here of a thousand with unequal sizes."""
    random = np.random.default_rng(0)
    counts = random.integers(5, 50, 1000)
    sums = random.binomial(counts, 0.3) * 1.0
    found = rate("error_rate", sums.tolist(), counts.tolist())
    assert found.value == pytest.approx(sums.sum() / counts.sum())
    draws = random.integers(0, 1000, (2000, 1000))
    spread = (sums[draws].sum(axis=1) / counts[draws].sum(axis=1)).std()
    assert found.standard_error == pytest.approx(spread, rel=0.06)


def test_one_example_has_no_standard_error():
    found = exponential("perplexity", measure("nats", [2.0]))
    assert found.value == pytest.approx(math.exp(2))
    assert found.standard_error is None


def test_the_error_of_an_exponential():
    nats = rate("nats", [2.0, 2.2, 1.9], [1, 1, 1])
    found = exponential("perplexity", nats)
    above, below = math.exp(nats.value + nats.standard_error), math.exp(nats.value - nats.standard_error)
    assert found.standard_error == pytest.approx((above - below) / 2, rel=0.01)


def test_as_json():
    result = Result("piqa", 4, (measure("accuracy", [1, 0, 1, 1]),), {"shots": 0})
    told = json.loads(json.dumps(result.as_dict()))
    assert told["measures"]["accuracy"]["value"] == result["accuracy"] == 0.75
    assert told["settings"] == {"shots": 0}


def test_an_exponential_may_be_infinite():
    assert exponential("perplexity", Measure("nats", 1000.0, None)).value == math.inf


def test_a_measure_by_a_wrong_name():
    result = Result("piqa", 2, (measure("accuracy", [True, False]),), {})
    assert result["accuracy"] == 0.5
    with pytest.raises(ClearheadError, match="did you mean 'accuracy'"):
        result["acuracy"]
