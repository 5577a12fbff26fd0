"""A toy to be measured."""

import pytest

from clearhead.api import Model
from clearhead.benchmark.subject import Subject
from tests.checkpoint.tiny import tiny_network

CAPACITY = 64


@pytest.fixture(autouse=True)
def _kernels(kernels):
    """All engines of ours step in them."""


@pytest.fixture
def subject(tmp_path):
    return Subject(Model(tiny_network(width=64, vocab_size=96)), None, CAPACITY, tmp_path)
