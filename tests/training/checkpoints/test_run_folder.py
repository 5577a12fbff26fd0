"""Test run folders: complete checkpoints whatever fails, locks, and warnings about damaged checkpoints."""

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
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.errors import ClearheadError
from clearhead.tensor_files import SafetensorsFile, safetensors_chunks
from clearhead.training.checkpoints.files import FileSystem, digest_file, write_file
from clearhead.training.checkpoints.run_folder import RunFolder
from clearhead.training.checkpoints.saved import assemble, find_pieces, verify_checkpoint
from clearhead.training.tensor_slice import TensorSlice
from tests.training.faulty_disk import FaultyFileSystem, exit_code, fork_child

NUM_KILLS = 200


def tensors_of(step):
    """Return tensors that contain the step, so that two saves can be distinguished."""
    weights = {"a.weight": torch.full((4, 8), float(step)), "a.bias": torch.full((4,), float(step))}
    return {"weights": weights, "optimizer": {"a.weight/step": torch.tensor(float(step))}}


def save(folder, step, **options):
    return RunFolder(folder, **options).save(step, tensors_of(step), {"loader": {"offset": step}})


def assert_complete(saved):
    verify_checkpoint(saved.folder)
    assert saved.state == {"loader": {"offset": saved.step}}
    for group, tensors in tensors_of(saved.step).items():
        loaded = saved.tensors(group)
        assert loaded.keys() == tensors.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_saved_checkpoint_is_read_back_unchanged(tmp_path):
    assert RunFolder(tmp_path).latest() is None
    folder = save(tmp_path, 7)
    assert_complete(RunFolder(tmp_path).latest())
    weights = safetensors.torch.load_file(folder / "weights.safetensors")
    assert torch.equal(weights["a.weight"], torch.full((4, 8), 7.0))
    with pytest.raises(ClearheadError, match="contains no tensors of the group 'momentum'"):
        RunFolder(tmp_path).latest().tensors("momentum")


def test_the_safetensors_library_reads_the_files(tmp_path, generator):
    dtypes = (torch.bool, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.float64)
    tensors = {str(dtype): (torch.randn(3, 5, generator=generator) * 9).to(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "transposed": torch.randn(3, 4).T}
    digest = write_file(FileSystem(), tmp_path / "x", safetensors_chunks(tensors, {"kind": "test"}))
    assert digest == digest_file(tmp_path / "x")
    loaded = safetensors.torch.load_file(tmp_path / "x")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    with safetensors.safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata() == {"kind": "test"}


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_slice_is_assembled_from_any_pieces(data):
    """Save pieces along one axis, as several processes would, and read a slice along any axes."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    tensor = torch.arange(math.prod(shape)).view(shape)
    axis, num_pieces = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 4))
    begins = [data.draw(st.integers(0, size - 1)) for size in shape]
    ends = [data.draw(st.integers(begin + 1, size)) for begin, size in zip(begins, shape, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        files, start = [], 0
        for number, piece in enumerate(tensor.chunk(num_pieces, dim=axis)):
            place = {"start": [start if i == axis else 0 for i in range(len(shape))], "whole": shape}
            path = Path(folder) / str(number)
            write_file(FileSystem(), path, safetensors_chunks({"x": piece}, {"places": json.dumps({"x": place})}))
            files.append(SafetensorsFile(path))
            start += piece.shape[axis]
        lengths = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        found = assemble(find_pieces(files)["x"], TensorSlice(tuple(begins), lengths, shape))
        assert torch.equal(found, tensor[tuple(map(slice, begins, ends))])


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert [folder.name for folder in RunFolder(tmp_path).checkpoint_folders()] == ["step-00000004", "step-00000003"]
    with pytest.raises(ClearheadError, match="keep is 0"):
        RunFolder(tmp_path, keep=0)


def test_a_step_with_an_intact_checkpoint_is_not_saved_again(tmp_path):
    save(tmp_path, 1)
    counting = FaultyFileSystem()
    save(tmp_path, 1, file_system=counting)
    assert counting.operations == []


# --- failures


def operations(tmp_path):
    counting = FaultyFileSystem()
    save(tmp_path / "counted", 1, keep=1)
    save(tmp_path / "counted", 2, keep=1, file_system=counting)
    assert set(counting.operations) == {"write", "fsync", "rename"}
    return counting.operations


def test_a_checkpoint_is_renamed_only_after_all_its_files_are_synced(tmp_path):
    """Write and sync four files, sync their folder, rename it, sync its parent, then rename the old checkpoint."""
    order = "".join(name[0] for name in operations(tmp_path))
    assert re.fullmatch("(w+f){4}f" + "rf" + "r", order)


@pytest.mark.parametrize("after_operation", [False, True])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_an_error_at_any_operation_is_reported_and_keeps_the_old_checkpoint(tmp_path, error, after_operation):
    names = operations(tmp_path)
    for number, name in enumerate(names):
        folder, warnings = tmp_path / f"at-{number}", []
        save(folder, 1, keep=1)
        faulty = FaultyFileSystem(fail_at=number, error=error, after_operation=after_operation)
        if number == len(names) - 1:  # the rename of the old checkpoint, after the new one is complete
            save(folder, 2, keep=1, file_system=faulty, warn=warnings.append)
            assert os.strerror(error) in warnings[0]
        else:
            with pytest.raises(ClearheadError, match=os.strerror(error)):
                save(folder, 2, keep=1, file_system=faulty)
            assert not list(folder.rglob("*.partial")), name
        assert_complete(RunFolder(folder).latest())
        with RunFolder(folder).lock():
            save(folder, 3, keep=1)
        assert RunFolder(folder).latest().step == 3


@pytest.mark.parametrize("after_operation", [False, True])
def test_a_kill_at_any_operation_keeps_a_complete_checkpoint(tmp_path, after_operation):
    names = operations(tmp_path)
    for number in range(len(names)):
        folder = tmp_path / f"at-{number}"
        save(folder, 1, keep=1)
        faulty = FaultyFileSystem(fail_at=number, kills=True, after_operation=after_operation)
        assert (
            exit_code(fork_child(lambda folder=folder, faulty=faulty: save(folder, 2, keep=1, file_system=faulty))) == 9
        )
        with RunFolder(folder).lock():
            assert not list(folder.rglob("*.partial"))
            assert_complete(RunFolder(folder).latest())
            save(folder, 3, keep=1)


def test_two_hundred_kills_at_random_moments_keep_a_complete_checkpoint(tmp_path):
    """A child process saves without pause and reports each completed save; it is killed at a random moment."""
    generator = random.Random(0)
    num_interrupted = 0
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

        child = fork_child(keep_saving)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            first = pipe.read(8)
            time.sleep(generator.uniform(0.0, 0.02))
            os.kill(child, signal.SIGKILL)
            assert exit_code(child) == -signal.SIGKILL
            reported = int.from_bytes((first + pipe.read())[-8:], "little")
        num_interrupted += bool(list(tmp_path.rglob("*.partial")))
        saved = RunFolder(tmp_path, warn=pytest.fail).latest()
        assert saved.step >= reported
        assert_complete(saved)
    assert num_interrupted > NUM_KILLS // 4, "most kills came between saves"


def test_a_file_size_limit_keeps_the_old_checkpoint(tmp_path):
    """The kernel rejects writes beyond the limit."""
    save(tmp_path, 1)

    def save_too_much():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            RunFolder(tmp_path).save(2, {"weights": {"a": torch.zeros(10_000)}}, {})
        except ClearheadError as error:
            return 5 if "File too large" in str(error) and "earlier checkpoints are unchanged" in str(error) else 6

    assert exit_code(fork_child(save_too_much)) == 5
    assert_complete(RunFolder(tmp_path).latest())


def test_a_path_that_is_a_file_is_rejected(tmp_path):
    (tmp_path / "x").write_text("a file")
    with (
        pytest.raises(ClearheadError, match="x is a file; give a folder for the run"),
        RunFolder(tmp_path / "x").lock(),
    ):
        pass


# --- damaged checkpoints


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def replace_by_older(path):
    shutil.copy(path.parent.parent / "step-00000001" / path.name, path)


FILES = ("weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip_bit, truncate, replace_by_older, os.unlink])
def test_a_damaged_checkpoint_gives_a_warning_and_the_previous_one_is_used(tmp_path, name, damage):
    save(tmp_path, 1)
    damaged = save(tmp_path, 2)
    damage(damaged / name)
    warnings = []
    run = RunFolder(tmp_path, keep=1, warn=warnings.append)
    saved = run.latest()
    assert saved.step == 1
    assert_complete(saved)
    assert len(warnings) == 1
    assert str(damaged) in warnings[0]
    assert name == "manifest.json" or name in warnings[0]
    run.save(2, tensors_of(2), {"loader": {"offset": 2}})
    assert_complete(RunFolder(tmp_path).latest())
    assert [folder.name for folder in run.checkpoint_folders()] == ["step-00000002"]


def test_a_damaged_checkpoint_does_not_displace_an_intact_one(tmp_path):
    save(tmp_path, 5)
    flip_bit(save(tmp_path, 9) / "weights.safetensors")
    run = RunFolder(tmp_path, keep=1, warn=lambda message: None)
    assert run.latest().step == 5
    run.save(7, tensors_of(7), {"loader": {"offset": 7}})
    assert [folder.name for folder in run.checkpoint_folders()] == ["step-00000007"]


def test_a_run_with_only_damaged_checkpoints_is_rejected(tmp_path):
    flip_bit(save(tmp_path, 1) / "weights.safetensors")
    with pytest.raises(ClearheadError, match=r"every checkpoint in .* is damaged"):
        RunFolder(tmp_path, warn=lambda message: None).latest()


@pytest.mark.parametrize(
    "change",
    [{"format": 2}, {"files": 3}, {"files": {"../../outside": {"bytes": 1, "sha256": "0"}}}, {"step": 8}, {"step": []}],
)
def test_an_invalid_manifest_is_rejected(tmp_path, change):
    folder = save(tmp_path, 1)
    (tmp_path / "outside").write_text("x")
    manifest = json.loads((folder / "manifest.json").read_text())
    files = change.get("files")
    if isinstance(files, dict):
        change = {"files": manifest["files"] | files}
    (folder / "manifest.json").write_text(json.dumps(manifest | change))
    with pytest.raises(ClearheadError):
        verify_checkpoint(folder)


# --- one run at a time


def fail_in_lock(folder, *file_names):
    with RunFolder(folder).lock():
        for name in file_names:
            (folder / name).write_text("x")
        raise ClearheadError("rejected")


def test_an_error_deletes_only_a_new_folder_without_results(tmp_path):
    with pytest.raises(ClearheadError, match="rejected"):
        fail_in_lock(tmp_path / "new", "recipe.toml")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ClearheadError, match="rejected"):
        fail_in_lock(tmp_path / "trained", "bad-batch-0.txt")
    assert (tmp_path / "trained" / "bad-batch-0.txt").exists()
    (tmp_path / "older").mkdir()
    with pytest.raises(ClearheadError, match="rejected"):
        fail_in_lock(tmp_path / "older", "recipe.toml")
    assert (tmp_path / "older").exists()


def test_a_lock_excludes_other_runs_until_its_process_ends(tmp_path):
    reader, writer = os.pipe()

    def hold_lock():
        with RunFolder(tmp_path).lock():
            os.write(writer, b"!")
            time.sleep(60)

    child = fork_child(hold_lock)
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
        assert_complete(RunFolder(tmp_path).latest())


def test_the_next_run_deletes_the_temporary_files_of_a_killed_one(tmp_path):
    leftovers = [tmp_path / name for name in ("loss.png.0a1b2c3d.partial", "tokenizer/tokenizer.json.0a1b2c3d.partial")]
    leftovers += [tmp_path / "checkpoints" / "step-00000003.partial" / "weights.safetensors"]
    for path in leftovers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"incomplete")
    (tmp_path / "notes.txt").write_text("mine")
    with RunFolder(tmp_path).lock():
        assert not any(path.exists() for path in leftovers)
        assert (tmp_path / "notes.txt").exists()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"start": [0, 0], "whole": [6]}, "damaged metadata"),
        ({"start": [-1], "whole": [6]}, "damaged metadata"),
        ({"start": ["0"], "whole": [6]}, "damaged metadata"),
        ({"start": [4], "whole": [6]}, "damaged metadata"),
        ({"start": [0], "whole": [10**12]}, "are missing"),
        (None, "damaged metadata"),
    ],
)
def test_pieces_that_do_not_fit_their_tensor_are_rejected(tmp_path, place, message):
    path = tmp_path / "x"
    places = {"places": json.dumps({"x": place})}
    write_file(FileSystem(), path, safetensors_chunks({"x": torch.zeros(3)}, places))
    with pytest.raises(ClearheadError, match=message):
        find_pieces([SafetensorsFile(path)])
