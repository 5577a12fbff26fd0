"""Kill a few training runs; see `killed_runs` for the full number. Lost and changed files must be found."""

import json

import pytest

from tests.slow.killed_runs import KilledRun, check_after_kill, check_end, folder_content, kill_many
from tests.slow.run_phases import PhaseBoard
from tests.training.recipes import recipe, run

pytestmark = pytest.mark.slow


def test_killed_runs_lose_nothing_and_end_bit_equal(tmp_path):
    lines = []
    counts = kill_many(12, tmp_path, seed=1, report=lines.append)
    assert counts["kills"] == 12
    assert counts["runs"] >= 1
    assert sum(count for name, count in counts.items() if name.startswith("in ")) == 12


@pytest.fixture
def two_runs(tmp_path):
    """Two equal runs, the second of which stands for a killed one."""
    for name in ("reference", "killed"):
        run(tmp_path / name)
    return KilledRun(recipe(), tmp_path / "killed", PhaseBoard()), tmp_path / "reference"


def test_two_equal_runs_pass(two_runs):
    killed, reference = two_runs
    assert check_after_kill(killed, reference, before=9) == 12
    check_end(killed, reference)


@pytest.mark.parametrize("name", sorted({"model/weights.safetensors", "sample.txt", "recipe.toml"}))
def test_a_changed_file_is_found(two_runs, name):
    killed, reference = two_runs
    path = killed.folder / name
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(AssertionError, match=name):
        check_end(killed, reference)


def test_a_leftover_file_is_found(two_runs):
    killed, reference = two_runs
    (killed.folder / "loss.png.partial").write_bytes(b"")
    with pytest.raises(AssertionError, match=r"loss\.png\.partial"):
        check_end(killed, reference)


def test_a_lost_checkpoint_and_a_lost_row_are_found(two_runs):
    killed, reference = two_runs
    with pytest.raises(AssertionError, match="was of step 15 and is now of step 12"):
        check_after_kill(killed, reference, before=15)
    metrics = killed.folder / "metrics.jsonl"
    rows = metrics.read_text().splitlines()
    metrics.write_text("\n".join(rows[:3] + rows[4:]))
    with pytest.raises(AssertionError, match=r"metrics\.jsonl up to step 12 differs"):
        check_after_kill(killed, reference, before=12)


def test_a_changed_loss_is_found(two_runs):
    killed, reference = two_runs
    metrics = killed.folder / "metrics.jsonl"
    first, *rest = metrics.read_text().splitlines()
    metrics.write_text("\n".join([json.dumps(json.loads(first) | {"loss": 1.0}), *rest]))
    with pytest.raises(AssertionError, match=r"metrics\.jsonl"):
        check_end(killed, reference)
    assert folder_content(reference)
