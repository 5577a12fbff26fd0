"""Give every test of costs an empty home folder, so that no calibration of this machine is read or replaced."""

import pytest


@pytest.fixture(autouse=True)
def empty_home(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_HOME", str(tmp_path))
