"""Run folders: whole or absent, whatever fails; held by one; told aloud where damaged."""

import errno
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.errors import ClearheadError
from clearhead.training.checkpoints.files import Files, put, read_back, tensor_chunks
from clearhead.training.checkpoints.run_folder import RunFolder
from clearhead.training.checkpoints.saved import open_file, read, stored_tensors, verify
from clearhead.training.distributed import Box
from tests.training.faults import Faulty, exit_code, in_child

NUM_KILLS = 200


def tensors_of(step):
    """Such that tensors of two saves cannot be mixed up."""
    weights = {"a.weight": torch.full((4, 8), float(step)), "a.bias": torch.full((4,), float(step))}
    return {"weights": weights, "optimizer": {"a.weight/step": torch.tensor(float(step))}}


def save(folder, step, **options):
    return RunFolder(folder, **options).save(step, tensors_of(step), {"loader": {"offset": step}})


def assert_whole(saved):
    verify(saved.folder)
    assert saved.state == {"loader": {"offset": saved.step}}
    for group, tensors in tensors_of(saved.step).items():
        read = saved.tensors(group)
        assert read.keys() == tensors.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_a_save_is_read_back_as_it_was(tmp_path):
    assert RunFolder(tmp_path).latest() is None
    folder = save(tmp_path, 7)
    assert_whole(RunFolder(tmp_path).latest())
    weights = safetensors.torch.load_file(folder / "weights.safetensors")
    assert torch.equal(weights["a.weight"], torch.full((4, 8), 7.0))
    with pytest.raises(ClearheadError, match="holds no momentum"):
        RunFolder(tmp_path).latest().tensors("momentum")


def test_files_are_what_the_safetensors_library_reads(tmp_path, generator):
    dtypes = (torch.bool, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.float64)
    tensors = {str(dtype): (torch.randn(3, 5, generator=generator) * 9).to(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "turned": torch.randn(3, 4).T}
    written = put(Files(), tmp_path / "x", tensor_chunks(tensors, {"kind": "test"}))
    assert written == read_back(tmp_path / "x")
    read = safetensors.torch.load_file(tmp_path / "x")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    with safetensors.safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata() == {"kind": "test"}


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_box_is_read_from_any_pieces(data):
    """Cut along one axis as one number of processes would, read along another as another number would."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    tensor = torch.arange(math.prod(shape)).view(shape)
    axis, num_pieces = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 4))
    begins = [data.draw(st.integers(0, size - 1)) for size in shape]
    ends = [data.draw(st.integers(begin + 1, size)) for begin, size in zip(begins, shape, strict=True)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        files, start = [], 0
        for number, piece in enumerate(tensor.chunk(num_pieces, dim=axis)):
            place = {"start": [start if i == axis else 0 for i in range(len(shape))], "whole": shape}
            path = Path(folder) / str(number)
            put(Files(), path, tensor_chunks({"x": piece}, {"places": json.dumps({"x": place})}))
            files.append(open_file(path, stack))
            start += piece.shape[axis]
        lengths = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        found = read(stored_tensors(files)["x"], Box(tuple(begins), lengths, shape))
        assert torch.equal(found, tensor[tuple(map(slice, begins, ends))])


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert [folder.name for folder in RunFolder(tmp_path).steps()] == ["step-00000004", "step-00000003"]
    with pytest.raises(ClearheadError, match="keep is 0"):
        RunFolder(tmp_path, keep=0)


def test_a_complete_step_is_not_written_again(tmp_path):
    save(tmp_path, 1)
    counting = Faulty()
    save(tmp_path, 1, files=counting)
    assert counting.done == []


# --- what fails


def operations(tmp_path):
    counting = Faulty()
    save(tmp_path / "counted", 1, keep=1)
    save(tmp_path / "counted", 2, keep=1, files=counting)
    assert set(counting.done) == {"write", "fsync", "rename"}
    return counting.done


def test_a_name_appears_only_when_all_behind_it_is_on_the_disk(tmp_path):
    """Four files, each synced; their folder; then the name, and the folder it is in; last the old one goes."""
    order = "".join(name[0] for name in operations(tmp_path))
    assert re.fullmatch("(w+f){4}f" + "rf" + "r", order)


@pytest.mark.parametrize("afterwards", [False, True])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_every_failing_operation_is_told_and_loses_nothing(tmp_path, error, afterwards):
    names = operations(tmp_path)
    for at, name in enumerate(names):
        folder, told = tmp_path / f"at-{at}", []
        save(folder, 1, keep=1)
        faulty = Faulty(at=at, error=error, afterwards=afterwards)
        if at == len(names) - 1:  # the old one's rename on its way out: the new one is there already
            save(folder, 2, keep=1, files=faulty, warn=told.append)
            assert os.strerror(error) in told[0]
        else:
            with pytest.raises(ClearheadError, match=os.strerror(error)):
                save(folder, 2, keep=1, files=faulty)
            assert not list(folder.rglob("*.partial")), name
        assert_whole(RunFolder(folder).latest())
        with RunFolder(folder).lock():
            save(folder, 3, keep=1)
        assert RunFolder(folder).latest().step == 3


@pytest.mark.parametrize("afterwards", [False, True])
def test_death_at_every_operation_loses_nothing(tmp_path, afterwards):
    names = operations(tmp_path)
    for at in range(len(names)):
        folder = tmp_path / f"at-{at}"
        save(folder, 1, keep=1)
        faulty = Faulty(at=at, deadly=True, afterwards=afterwards)
        assert exit_code(in_child(lambda folder=folder, faulty=faulty: save(folder, 2, keep=1, files=faulty))) == 9
        with RunFolder(folder).lock():
            assert not list(folder.rglob("*.partial"))
            assert_whole(RunFolder(folder).latest())
            save(folder, 3, keep=1)


def test_two_hundred_kills_lose_nothing(tmp_path):
    """A child saves without pause and reports each save that returned; it is killed at a random moment."""
    draw = random.Random(0)
    cut_short = 0
    for _ in range(NUM_KILLS):
        reader, writer = os.pipe()

        def keep_saving(writer=writer):
            run = RunFolder(tmp_path, keep=1)
            with run.lock():
                saved = run.latest()
                step = saved.step if saved else 0
                while True:
                    step += 1
                    run.save(step, tensors_of(step), {"loader": {"offset": step}})
                    os.write(writer, step.to_bytes(8, "little"))

        child = in_child(keep_saving)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            first = pipe.read(8)
            time.sleep(draw.uniform(0.0, 0.02))
            os.kill(child, signal.SIGKILL)
            assert exit_code(child) == -signal.SIGKILL
            reported = int.from_bytes((first + pipe.read())[-8:], "little")
        cut_short += bool(list(tmp_path.rglob("*.partial")))
        saved = RunFolder(tmp_path, warn=pytest.fail).latest()
        assert saved.step >= reported
        assert_whole(saved)
    assert cut_short > NUM_KILLS // 4, "the kills came between saves"


def test_a_disk_that_is_really_full(tmp_path):
    """The kernel's own refusal: a file may not grow beyond a limit."""
    save(tmp_path, 1)

    def too_large():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            RunFolder(tmp_path).save(2, {"weights": {"a": torch.zeros(10_000)}}, {})
        except ClearheadError as error:
            return 5 if "File too large" in str(error) and "untouched" in str(error) else 6

    assert exit_code(in_child(too_large)) == 5
    assert_whole(RunFolder(tmp_path).latest())


def test_a_path_that_cannot_be_a_folder(tmp_path):
    (tmp_path / "x").write_text("a file")
    with pytest.raises(ClearheadError, match="cannot be used as a run folder"), RunFolder(tmp_path / "x").lock():
        pass


# --- what is damaged


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def swap(path):
    shutil.copy(path.parent.parent / "step-00000001" / path.name, path)


FILES = ("weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip, cut, swap, os.unlink])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path, name, damage):
    save(tmp_path, 1)
    broken = save(tmp_path, 2)
    damage(broken / name)
    told = []
    run = RunFolder(tmp_path, keep=1, warn=told.append)
    saved = run.latest()
    assert saved.step == 1
    assert_whole(saved)
    assert len(told) == 1
    assert str(broken) in told[0]
    assert name == "manifest.json" or name in told[0]
    run.save(2, tensors_of(2), {"loader": {"offset": 2}})
    assert_whole(RunFolder(tmp_path).latest())
    assert [folder.name for folder in run.steps()] == ["step-00000002"]


def test_a_damaged_newest_does_not_push_out_a_sound_one(tmp_path):
    save(tmp_path, 5)
    flip(save(tmp_path, 9) / "weights.safetensors")
    run = RunFolder(tmp_path, keep=1, warn=lambda sentence: None)
    assert run.latest().step == 5
    run.save(7, tensors_of(7), {"loader": {"offset": 7}})
    assert [folder.name for folder in run.steps()] == ["step-00000007"]


def test_nothing_but_damage_is_an_error_and_not_a_new_start(tmp_path):
    flip(save(tmp_path, 1) / "weights.safetensors")
    with pytest.raises(ClearheadError, match=r"every checkpoint in .* is damaged"):
        RunFolder(tmp_path, warn=lambda sentence: None).latest()


@pytest.mark.parametrize(
    "change",
    [{"format": 2}, {"files": 3}, {"files": {"../../outside": {"bytes": 1, "sha256": "0"}}}, {"step": 8}, {"step": []}],
)
def test_a_foreign_manifest_is_refused(tmp_path, change):
    folder = save(tmp_path, 1)
    (tmp_path / "outside").write_text("x")
    manifest = json.loads((folder / "manifest.json").read_text())
    files = change.get("files")
    if isinstance(files, dict):
        change = {"files": manifest["files"] | files}
    (folder / "manifest.json").write_text(json.dumps(manifest | change))
    with pytest.raises(ClearheadError):
        verify(folder)


# --- one run at a time


def fails(folder, *left):
    with RunFolder(folder).lock():
        for name in left:
            (folder / name).write_text("x")
        raise ClearheadError("no")


def test_only_a_new_folder_without_a_step_goes_again(tmp_path):
    with pytest.raises(ClearheadError, match="no"):
        fails(tmp_path / "refused", "recipe.toml")
    assert not (tmp_path / "refused").exists()
    with pytest.raises(ClearheadError, match="no"):
        fails(tmp_path / "begun", "bad-batch-0.txt")
    assert (tmp_path / "begun" / "bad-batch-0.txt").exists()
    (tmp_path / "older").mkdir()
    with pytest.raises(ClearheadError, match="no"):
        fails(tmp_path / "older", "recipe.toml")
    assert (tmp_path / "older").exists()


def test_two_runs_in_one_folder_are_refused_and_a_dead_owner_is_no_obstacle(tmp_path):
    reader, writer = os.pipe()

    def hold():
        with RunFolder(tmp_path).lock():
            os.write(writer, b"!")
            time.sleep(60)

    child = in_child(hold)
    os.close(writer)
    assert os.read(reader, 1) == b"!"
    os.close(reader)
    with pytest.raises(ClearheadError, match=f"in use by process {child}"), RunFolder(tmp_path).lock():
        pass
    os.kill(child, signal.SIGKILL)
    exit_code(child)
    with RunFolder(tmp_path).lock():
        save(tmp_path, 1)
    with RunFolder(tmp_path).lock():
        assert_whole(RunFolder(tmp_path).latest())
