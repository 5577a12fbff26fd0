"""Settings that cannot work are refused before a model is loaded."""

from pathlib import Path

import pytest

from clearhead.errors import ClearheadError
from clearhead.server import ServerSettings


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"port": 65536}, "port is 65536; it must be from 1 to 65535"),
        ({"max_concurrent": 0}, "max_concurrent is 0; it must be 1 or more"),
        ({"max_queued": -1}, "max_queued is -1; it must be 0 or more"),
        ({"gather_seconds": float("nan")}, "gather_seconds is nan; it must be 0 or more"),
        ({"aliases": ("good", " ")}, "the alias ' ' is not a valid name"),
        ({"runs": Path("no/such/folder")}, "the folder of training runs 'no/such/folder' does not exist"),
    ],
)
def test_a_wrong_setting_is_named(wrong, message):
    with pytest.raises(ClearheadError) as error:
        ServerSettings(**wrong)
    assert message in str(error.value)


def test_a_folder_of_runs_that_exists_is_accepted(tmp_path):
    assert ServerSettings(runs=tmp_path).runs == tmp_path
