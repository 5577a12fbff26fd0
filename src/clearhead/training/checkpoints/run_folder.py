"""Manage the folder of a run: complete checkpoints only, and one running process at a time.

    run = RunFolder("runs/x")
    with run.lock():
        saved = run.latest()                    # None for a new run
        run.save(step, {"weights": weights, "optimizer": ..., "randomness": ...}, {"loader": loader_state})

    runs/x/lock                                 locked while a run is active
    runs/x/checkpoints/step-00000200/           appears by one rename, after its files are on disk
        weights.safetensors  optimizer.safetensors  randomness.safetensors  state.json
        manifest.json                           the size and sha256 of each file, written last

Several processes write one file each, such as `weights-00001-of-00004.safetensors`, with the shards that they hold. Any
number of processes can read them. A tensor is sharded like the weight of the same name, or of the name before the last
`/`.
"""

import fcntl
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.tensor_files import safetensors_chunks
from clearhead.terminal import one_line
from clearhead.training.checkpoints.files import FileSystem, digest_file, sync_folder, write_file
from clearhead.training.checkpoints.saved import (
    FORMAT,
    MANIFEST_FILE,
    RANDOM_STATE_GROUP,
    STATE_FILE,
    SavedCheckpoint,
    find_weight,
    read_manifest,
    verify_checkpoint,
)
from clearhead.training.distributed import World, to_local

_PARTIAL = ".partial"  # suffix of a folder that is being written or deleted
_WRITTEN_FOLDERS = ("tokenizer", "adapter")  # folders in which a run writes single files
_FILES_BEFORE_TRAINING = {"lock", "checkpoints", "recipe.toml", "tokenizer"}


def _print_warning(message: str) -> None:
    print(f"clearhead: {one_line(message)}", file=sys.stderr, flush=True)


class RunFolder:
    """The folder of one run. All processes of the run call its methods; the main process does the shared work."""

    def __init__(
        self,
        path: str | Path,
        *,
        keep: int = 2,
        world: World | None = None,
        file_system: FileSystem | None = None,
        warn: Callable[[str], None] = _print_warning,
    ):
        """`keep` is the number of checkpoints that stay on disk."""
        if keep < 1:
            raise ClearheadError(f"keep is {keep}; a run must keep at least 1 checkpoint")
        self.path, self.keep, self.warn = Path(path), keep, warn
        self.world = world or World.single_process()
        self.file_system = file_system or FileSystem()
        self.checkpoints = self.path / "checkpoints"
        self.damaged: set[Path] = set()
        self.is_new = False

    # --- one run at a time

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder, and delete what an interrupted save left behind.

        Raise ClearheadError if another living process holds the lock. If an error occurs before the first step, a
        folder that was newly created is deleted.
        """
        descriptors: list[int] = []
        try:
            self._on_main(lambda: descriptors.append(self._acquire_lock()))
            self._on_main(self._delete_leftovers)
            yield
        except ClearheadError:
            if descriptors and self.is_new and not self._has_results():
                shutil.rmtree(self.path)
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _acquire_lock(self) -> int:
        if self.path.is_file():
            raise ClearheadError(f"{self.path} is a file; give a folder for the run")
        with _disk_errors(f"{self.path} cannot be used as a run folder"):
            self.is_new = not self.path.exists()
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            try:
                # Not flock: a data worker that was forked from a killed run would still hold it.
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # already locked: EAGAIN on some systems, EACCES on others
                owner = os.read(descriptor, 32).decode(errors="replace").strip()
                os.close(descriptor)
                raise ClearheadError(
                    f"{self.path} is in use by process {owner}; wait for it or choose another folder"
                ) from None
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        return descriptor

    def _has_results(self) -> bool:
        has_other_files = any(entry.name not in _FILES_BEFORE_TRAINING for entry in self.path.iterdir())
        return bool(self.checkpoint_folders()) or has_other_files

    def _delete_leftovers(self) -> None:
        """Delete what a killed process left: incomplete checkpoints, and temporary files of `atomic_write`."""
        for folder in self.checkpoints.glob(f"*{_PARTIAL}"):
            with _disk_errors(f"{folder}, left by an interrupted save, cannot be deleted"):
                shutil.rmtree(folder)
        for folder in (self.path, *(self.path / name for name in _WRITTEN_FOLDERS)):
            for file in folder.glob(f"*{_PARTIAL}"):
                with _disk_errors(f"{file}, left by an interrupted run, cannot be deleted"):
                    file.unlink()

    # --- saving

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]) -> Path:
        """Save groups of tensors and a JSON state completely or not at all, and return the checkpoint's folder.

        After the new checkpoint was read back, all but the newest `keep` are deleted. A step that already has an
        intact checkpoint is not saved again.
        """
        final = self.checkpoints / f"step-{step:08d}"
        if self._on_main(lambda: final.exists() and final not in self.damaged):
            return final
        partial = final.with_name(final.name + _PARTIAL)
        try:
            self._on_main(lambda: self._create_partial_folder(partial))
            entries = self.world.run_everywhere(lambda: self._write_tensors(partial, tensors))
            files = {name: entry for own_files in entries for name, entry in own_files.items()}
            self._on_main(lambda: self._publish(final, partial, step, files, state))
        except ClearheadError:
            self._on_main(lambda: shutil.rmtree(partial, ignore_errors=True))
            raise
        self._on_main(lambda: self._delete_old_checkpoints(final))
        return final

    def _create_partial_folder(self, partial: Path) -> None:
        with _disk_errors(f"{partial} cannot be written"):
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(parents=True)

    def _write_tensors(self, folder: Path, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
        """Write this process's file of each group, and return their manifest entries by file name."""
        entries = {}
        for group, group_tensors in tensors.items():
            pieces, places = self._own_pieces(group, group_tensors, tensors.get("weights", {}))
            suffix = f"-{self.world.rank + 1:05d}-of-{self.world.size:05d}" if self.world.size > 1 else ""
            name = f"{group}{suffix}.safetensors"
            chunks = safetensors_chunks(pieces, {"places": json.dumps(places)} if places else {})
            entries[name] = self._write_file(folder / name, chunks) | {"group": group}
        return entries

    def _own_pieces(
        self, group: str, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors that this process writes and, for each shard among them, its start and full shape."""
        if group == RANDOM_STATE_GROUP:
            is_first = self.world.rank == self.world.data_rank  # among the processes that read the same rows
            return {f"{self.world.data_rank}/{name}": tensor for name, tensor in tensors.items() if is_first}, {}
        pieces, places = {}, {}
        for name, tensor in tensors.items():
            part = self.world.slice_of(tensor, find_weight(name, weights))
            if not part.is_full and 0 not in part.shape:  # 0 if there are more processes than rows to shard
                pieces[name], places[name] = to_local(tensor), {"start": part.start, "whole": part.full_shape}
            elif part.is_full and self.world.is_main:
                pieces[name] = to_local(tensor)
        return pieces, places

    def _write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
        with _disk_errors(f"{path} could not be written; earlier checkpoints are unchanged"):
            digest = write_file(self.file_system, path, chunks)
            if digest_file(path) != digest:
                raise ClearheadError(f"{path} differs from what was written when it is read back; check the disk")
        return {"bytes": digest.num_bytes, "sha256": digest.sha256}

    def _publish(self, final: Path, partial: Path, step: int, files: dict[str, Any], state: dict[str, Any]) -> None:
        """Write state and manifest, and rename the complete folder to its final name."""
        files = files | {STATE_FILE: self._write_file(partial / STATE_FILE, [json.dumps(state).encode()])}
        manifest = {"format": FORMAT, "step": step, "parts": self.world.num_data_ranks, "files": files}
        self._write_file(partial / MANIFEST_FILE, [json.dumps(manifest, indent=2).encode()])
        with _disk_errors(f"{final} could not be created; earlier checkpoints are unchanged"):
            sync_folder(self.file_system, partial)
            if final.exists():  # only if it is damaged
                shutil.rmtree(final)
            self.file_system.rename(partial, final)
            sync_folder(self.file_system, self.checkpoints)
        read_manifest(final)
        self.damaged.discard(final)

    def delete_surplus(self, newest: SavedCheckpoint) -> None:
        """Delete what a run left that was killed after it had saved its newest checkpoint.

        Damaged checkpoints stay until the next save.
        """
        self._on_main(lambda: None if self.damaged else self._delete_old_checkpoints(newest.folder))

    def _delete_old_checkpoints(self, newest: Path) -> None:
        """Delete damaged checkpoints and all but the newest `keep`.

        A folder is renamed before it is deleted, so that a partly deleted one never counts as a checkpoint.
        """
        others = [folder for folder in self.checkpoint_folders() if folder != newest]
        intact = [folder for folder in others if folder not in self.damaged]
        for folder in (folder for folder in others if folder not in intact[: self.keep - 1]):
            partial = folder.with_name(folder.name + _PARTIAL)
            try:
                self.file_system.rename(folder, partial)
                shutil.rmtree(partial)
            except OSError as error:
                self.warn(f"the old checkpoint {folder} could not be deleted: {error.strerror}")

    # --- reading

    def latest(self) -> SavedCheckpoint | None:
        """Return the newest intact checkpoint, or None for a new run. Print a warning for each damaged one."""
        folder = self._on_main(self._find_newest_intact)
        if folder is None:
            return None
        saved = SavedCheckpoint(Path(folder), self.world)
        before, now = saved.num_data_ranks, self.world.num_data_ranks
        if self.world.is_main and before != now:
            self.warn(
                f"{saved.folder} was written by {before} data-parallel processes and is resumed by {now}, "
                "so dropout uses new random numbers from here"
            )
        return saved

    def _find_newest_intact(self) -> str | None:
        folders = self.checkpoint_folders()
        for folder in folders:
            try:
                verify_checkpoint(folder)
            except ClearheadError as error:
                self.damaged.add(folder)
                self.warn(f"{error}; trying an earlier checkpoint")
            else:
                return str(folder)
        if folders:
            raise ClearheadError(f"every checkpoint in {self.checkpoints} is damaged; delete them to start again")
        return None

    def checkpoint_folders(self) -> list[Path]:
        """Return the folders of all checkpoints, newest first."""
        folders = [folder for folder in self.checkpoints.glob("step-*") if re.fullmatch(r"step-\d{8,}", folder.name)]
        return sorted(folders, key=lambda folder: -int(folder.name.removeprefix("step-")))

    def _on_main(self, action: Callable[[], Any]) -> Any:
        """Run an action in the main process only. All processes return its result or raise its error."""
        return self.world.run_everywhere(lambda: action() if self.world.is_main else None)[0]


@contextmanager
def _disk_errors(message: str) -> Iterator[None]:
    """Turn an OSError into a ClearheadError that starts with `message`."""
    try:
        yield
    except OSError as error:
        raise ClearheadError(f"{message}: {error.strerror or error}") from error
