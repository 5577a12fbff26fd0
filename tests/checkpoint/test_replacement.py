"""Saving over a model: a kill at any moment leaves the old or the new one, and other files stay."""

import json
import os

import pytest
import torch

from clearhead.api import Model, load
from clearhead.checkpoint import replacement
from clearhead.checkpoint.replacement import replace_folder
from clearhead.errors import ClearheadError
from tests.checkpoint import interrupted_saves
from tests.checkpoint.tiny import same_network, tiny_network
from tests.forked_command import call_in_fork

KINDS = ["native", "huggingface", "shards", "renames", "in-place"]


def kill_saves(kind, folder, num_kills):
    """Return how often each model was found, and assert that nothing else was."""
    result = call_in_fork(lambda: interrupted_saves.main(kind, folder / "model", num_kills))
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    found = report["found"]
    if kind == "in-place":
        found = {text: times for text, times in found.items() if "the last save to it was interrupted" not in text}
    assert set(found) <= {"0", "1"}
    assert report["end"] == "1"
    leftovers = [name for name in report["files"] if "partial" in name or "saving" in name or "previous" in name]
    assert leftovers == []
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_save_leaves_the_old_or_the_new_model(tmp_path, kind):
    assert kill_saves(kind, tmp_path, num_kills=12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_five_hundred_killed_saves_leave_the_old_or_the_new_model(tmp_path, kind):
    assert set(kill_saves(kind, tmp_path, num_kills=100)) == {"0", "1"}


def test_an_error_while_saving_leaves_the_old_model(tmp_path, monkeypatch):
    Model(tiny_network()).save(tmp_path / "model")

    class Full:
        def save(self, folder):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("clearhead.api.model.check_save_folder", lambda *arguments: None)
    with pytest.raises(ClearheadError, match=r"cannot be saved to .*: No space left on device"):
        Model(tiny_network(seed=1), Full()).save(tmp_path / "model")
    assert same_network(load(tmp_path / "model").network, tiny_network())
    assert os.listdir(tmp_path) == ["model"]


def test_other_files_links_and_permissions_stay(tmp_path):
    folder = tmp_path / "model"
    Model(tiny_network()).save(folder)
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("keep me")
    (folder / "link").symlink_to("notes/a.txt")
    folder.chmod(0o750)
    (tmp_path / "alias").symlink_to("model")
    Model(tiny_network(seed=1)).save(tmp_path / "alias")
    assert (tmp_path / "alias").is_symlink()
    assert (folder / "link").is_symlink()
    assert (folder / "link").read_text() == "keep me"
    assert folder.stat().st_mode & 0o777 == 0o750
    assert same_network(load(folder).network, tiny_network(seed=1))


def test_a_save_into_the_working_directory_keeps_the_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Model(tiny_network()).save(".")
    (tmp_path / "notes").mkdir()
    before = tmp_path.stat().st_ino
    Model(tiny_network(seed=1)).save(".")
    assert tmp_path.stat().st_ino == before
    assert sorted(os.listdir()) == ["clearhead.json", "notes", "weights.safetensors"]
    assert same_network(load(".").network, tiny_network(seed=1))


def test_a_folder_whose_save_in_place_was_interrupted_is_rejected(tmp_path):
    Model(tiny_network()).save(tmp_path)
    (tmp_path / ".save-in-progress").touch()
    with pytest.raises(ClearheadError, match="incomplete: the last save to it was interrupted; save the model again"):
        load(tmp_path)
    Model(tiny_network(seed=1)).save(tmp_path)
    assert same_network(load(tmp_path).network, tiny_network(seed=1))


def test_the_old_model_is_restored_after_a_kill_between_two_renames(tmp_path):
    Model(tiny_network()).save(tmp_path / "model")
    (tmp_path / "model").rename(tmp_path / ".model.01234567.previous")
    assert same_network(load(tmp_path / "model").network, tiny_network())
    assert os.listdir(tmp_path) == ["model"]


def test_two_saves_at_once_do_not_delete_each_others_folders(tmp_path):
    with replace_folder(tmp_path / "model") as one:
        (one / "a").touch()
        with replace_folder(tmp_path / "model") as other:
            (other / "b").touch()
        assert os.listdir(tmp_path / "model") == ["b"]
    assert os.listdir(tmp_path / "model") == ["a"]
    assert os.listdir(tmp_path) == ["model"]


def test_files_are_copied_where_links_are_not_possible(tmp_path, monkeypatch):
    def no_link(*arguments, **options):
        raise OSError(1, "Operation not permitted")

    Model(tiny_network()).save(tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("keep me")
    monkeypatch.setattr(replacement.os, "link", no_link)
    Model(tiny_network(seed=1)).save(tmp_path / "model")
    assert (tmp_path / "model" / "README.md").read_text() == "keep me"


def test_a_model_that_is_replaced_while_it_is_loaded_is_rejected(tmp_path):
    Model(tiny_network()).save(tmp_path / "model")

    def replace(name, num_done, num_total):
        if num_done == 1:
            Model(tiny_network(seed=1)).save(tmp_path / "model")

    with pytest.raises(ClearheadError, match="was replaced by another model while it was loaded; load it again"):
        load(tmp_path / "model", torch.float32, progress=replace)
