"""Fixtures: a toy model to benchmark."""

import pytest

from clearhead.api import Model
from clearhead.benchmark import BenchmarkTarget
from tests.checkpoint.tiny import tiny_network

CAPACITY = 64


@pytest.fixture(autouse=True)
def _kernels(kernels):
    """Require the C++ kernels, in which all engines of Clearhead run."""


@pytest.fixture
def target(tmp_path):
    return BenchmarkTarget(Model(tiny_network(width=64, vocab_size=96)), None, CAPACITY, tmp_path)
