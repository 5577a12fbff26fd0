"""Every test of costs has a home of its own, so that no calibration of this machine is read or replaced."""

import pytest


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_HOME", str(tmp_path))
