"""A toy to be measured."""

import pytest

from clearhead.benchmark.subject import Subject
from clearhead.bundle import Model
from clearhead.errors import ClearheadError
from clearhead.fast import cpu
from tests.checkpoint.tiny import tiny_network

CAPACITY = 64


@pytest.fixture(autouse=True, scope="session")
def _kernels():
    try:
        cpu.library(build=True)
    except ClearheadError as error:
        pytest.skip(str(error))


@pytest.fixture
def subject(tmp_path):
    return Subject(Model(tiny_network(width=64, vocab_size=96)), None, CAPACITY, tmp_path)
