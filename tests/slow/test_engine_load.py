"""A short run of the random load on a toy model; the script itself runs for minutes on real ones."""

import pytest

from clearhead.api import Model
from tests.model.toys import decoder, toy
from tests.slow.engine_load import run


@pytest.mark.slow
def test_a_random_load_with_aborts_loses_nothing():
    result = run(Model(toy(decoder())), seconds=10, memory=2**18)
    assert result["tokens"] > 0
    assert result["different_answers_to_the_probe"] == 1
    assert {"length", "aborted", "error"} <= result["requests"].keys()
