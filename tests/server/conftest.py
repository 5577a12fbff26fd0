"""One server with a toy chat model for all tests of a file."""

import pytest

from tests.server.toys import serve, toy_model


@pytest.fixture(scope="module")
def server():
    with serve(toy_model()) as running:
        yield running
        running.wait_until_idle()
