"""Parameters by formula against the network on the meta device, part by part, for every preset."""

import pytest

from clearhead.costs.formulas.parameters import active_parameters, parameters
from clearhead.families import preset, presets
from clearhead.summary import summarize
from tests.costs.cases import CASES


@pytest.mark.parametrize("name", presets())
def test_every_preset(name):
    config = preset(name)
    summary = summarize(config)
    assert parameters(config) == summary.parts
    assert active_parameters(config) == summary.active_parameters


@pytest.mark.parametrize("name", CASES)
def test_every_toy(name):
    assert parameters(CASES[name]) == summarize(CASES[name]).parts
