"""The folder of downloads and measurements."""

from pathlib import Path

import pytest

from clearhead.home import home


def test_home_follows_the_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLEARHEAD_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert home() == Path("/home/somebody/.cache/clearhead")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert home() == Path("/caches/clearhead")
    monkeypatch.setenv("CLEARHEAD_HOME", "~/models")
    assert home() == Path("/home/somebody/models")
