"""A run folder: checkpoints that are there whole or not at all, and one run at a time.

    run = RunFolder("runs/x")
    with run.lock():
        saved = run.latest()                    # None: a new run
        run.save(step, {"weights": weights, "optimizer": ..., "randomness": ...}, {"loader": loader_state})

    runs/x/lock                                 held while a run is alive
    runs/x/checkpoints/step-00000200/           appears by one rename, when all in it is on the disk
        weights.safetensors  optimizer.safetensors  randomness.safetensors  state.json
        manifest.json                           the size and sha256 of each file, written last

Several processes write a file each, `weights-00001-of-00004.safetensors` with the slices that it holds; any number of
processes can read them. A tensor is sliced as the weight of its name is, or of its name up to the last `/`.
"""

import fcntl
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.training.checkpoints.files import Files, put, read_back, sync_folder, tensor_chunks
from clearhead.training.checkpoints.saved import (
    FORMAT,
    MANIFEST,
    OF_EACH_PART,
    STATE,
    Saved,
    check_manifest,
    verify,
    weight_of,
)
from clearhead.training.distributed import World, local

PARTIAL = ".partial"  # a folder that is being written or removed
BEFORE_ANY_STEP = {"lock", "checkpoints", "recipe.toml", "tokenizer"}


def warn(sentence: str) -> None:
    print(f"clearhead: {sentence}", file=sys.stderr, flush=True)


class RunFolder:
    def __init__(
        self,
        path: str | Path,
        *,
        keep: int = 2,
        world: World | None = None,
        files: Files | None = None,
        warn: Callable[[str], None] = warn,
    ):
        if keep < 1:
            raise ClearheadError(f"keep is {keep}; a run keeps 1 checkpoint or more")
        self.path, self.keep, self.warn = Path(path), keep, warn
        self.world = world or World.alone()
        self.files = files or Files()
        self.checkpoints = self.path / "checkpoints"
        self.damaged: set[Path] = set()
        self.is_new = False

    # --- one run at a time

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Refused while another process has it; a process that died has not. Clears away what a killed save left.

        A new folder goes again if an error comes before the first step.
        """
        held: list[int] = []
        try:
            self.main(lambda: held.append(self.acquire()))
            self.main(self.clear_partials)
            yield
        except ClearheadError:
            if held and self.is_new and not self.has_begun():
                shutil.rmtree(self.path)
            raise
        finally:
            for descriptor in held:
                os.close(descriptor)

    def acquire(self) -> int:
        with explained(f"{self.path} cannot be used as a run folder"):
            self.is_new = not self.path.exists()
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            try:
                # Not flock: a data worker forked from a killed run would go on holding that.
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # held: EAGAIN on some systems, EACCES on others
                owner = os.read(descriptor, 32).decode(errors="replace").strip()
                os.close(descriptor)
                raise ClearheadError(f"{self.path} is in use by process {owner}; wait or give another folder") from None
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        return descriptor

    def has_begun(self) -> bool:
        return bool(self.steps()) or any(entry.name not in BEFORE_ANY_STEP for entry in self.path.iterdir())

    def clear_partials(self) -> None:
        for leftover in self.checkpoints.glob(f"*{PARTIAL}"):
            with explained(f"{leftover}, left by a save that was cut short, cannot be removed"):
                shutil.rmtree(leftover)

    # --- saving

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]) -> Path:
        """All of it or nothing. Older checkpoints but `keep` go after this one was read back. A step is saved once."""
        final = self.checkpoints / f"step-{step:08d}"
        if self.main(lambda: final.exists() and final not in self.damaged):
            return final
        partial = final.with_name(final.name + PARTIAL)
        try:
            self.main(lambda: self.begin(partial))
            parts = self.world.together(lambda: self.write_tensors(partial, tensors))
            written = {name: entry for part in parts for name, entry in part.items()}
            self.main(lambda: self.finish(final, partial, step, written, state))
        except ClearheadError:
            self.main(lambda: shutil.rmtree(partial, ignore_errors=True))
            raise
        self.main(lambda: self.prune(final))
        return final

    def begin(self, partial: Path) -> None:
        with explained(f"{partial} cannot be written"):
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(parents=True)

    def write_tensors(self, folder: Path, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
        """This process's file of each group: its entry in the manifest, by file name."""
        entries = {}
        for group, of_group in tensors.items():
            pieces, places = self.pieces(group, of_group, tensors.get("weights", {}))
            several = f"-{self.world.rank + 1:05d}-of-{self.world.size:05d}" if self.world.size > 1 else ""
            name = f"{group}{several}.safetensors"
            chunks = tensor_chunks(pieces, {"places": json.dumps(places)} if places else {})
            entries[name] = self.put(folder / name, chunks) | {"group": group}
        return entries

    def pieces(
        self, group: str, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What this process writes, and the places of the slices among it: the start of each, and the whole shape."""
        if group == OF_EACH_PART:
            first_of_part = self.world.rank == self.world.data_rank
            return {f"{self.world.data_rank}/{name}": tensor for name, tensor in tensors.items() if first_of_part}, {}
        pieces, places = {}, {}
        for name, tensor in tensors.items():
            box = self.world.box(tensor, weight_of(name, weights))
            is_slice = box.shape != box.whole
            if is_slice and 0 not in box.shape:  # 0: there are more processes than rows to give
                pieces[name], places[name] = local(tensor), {"start": box.start, "whole": box.whole}
            elif not is_slice and self.world.is_main:
                pieces[name] = local(tensor)
        return pieces, places

    def put(self, path: Path, chunks: Any) -> dict[str, Any]:
        with explained(f"{path} could not be written; earlier checkpoints are untouched"):
            written = put(self.files, path, chunks)
            if read_back(path) != written:
                raise ClearheadError(f"{path} reads back otherwise than it was written; the disk is failing")
        return {"bytes": written.num_bytes, "sha256": written.sha256}

    def finish(self, final: Path, partial: Path, step: int, written: dict[str, Any], state: dict[str, Any]) -> None:
        written = written | {STATE: self.put(partial / STATE, [json.dumps(state).encode()])}
        manifest = {"format": FORMAT, "step": step, "parts": self.world.data_size, "files": written}
        self.put(partial / MANIFEST, [json.dumps(manifest, indent=2).encode()])
        with explained(f"{final} could not be put in place; earlier checkpoints are untouched"):
            sync_folder(self.files, partial)
            if final.exists():  # damaged, or it would not be written again
                shutil.rmtree(final)
            self.files.rename(partial, final)
            sync_folder(self.files, self.checkpoints)
        check_manifest(final)
        self.damaged.discard(final)

    def prune(self, newest: Path) -> None:
        """A folder is renamed before it is removed, so that no half of it is ever taken for a checkpoint."""
        others = [folder for folder in self.steps() if folder != newest]
        sound = [folder for folder in others if folder not in self.damaged]
        for folder in (folder for folder in others if folder not in sound[: self.keep - 1]):
            leaving = folder.with_name(folder.name + PARTIAL)
            try:
                self.files.rename(folder, leaving)
                shutil.rmtree(leaving)
            except OSError as error:
                self.warn(f"the old checkpoint {folder} could not be removed: {error.strerror}")

    # --- reading

    def latest(self) -> Saved | None:
        """The newest checkpoint that is whole; damaged ones are named aloud and passed over."""
        found = self.main(self.newest_sound)
        if found is None:
            return None
        saved = Saved(Path(found), self.world)
        if self.world.is_main and saved.num_parts != self.world.data_size:
            parts = f"{saved.num_parts} processes with rows of their own, and goes on in {self.world.data_size}"
            self.warn(f"{saved.folder} was written by {parts}: dropout draws anew from here")
        return saved

    def newest_sound(self) -> str | None:
        folders = self.steps()
        for folder in folders:
            try:
                verify(folder)
            except ClearheadError as error:
                self.damaged.add(folder)
                self.warn(f"{error}; looking for an earlier checkpoint")
            else:
                return str(folder)
        if folders:
            raise ClearheadError(f"every checkpoint in {self.checkpoints} is damaged; remove them to start anew")
        return None

    def steps(self) -> list[Path]:
        """Newest first."""
        found = [folder for folder in self.checkpoints.glob("step-*") if re.fullmatch(r"step-\d{8,}", folder.name)]
        return sorted(found, key=lambda folder: -int(folder.name.removeprefix("step-")))

    def main(self, action: Callable[[], Any]) -> Any:
        """Done by one process; all get what it gave, or its error."""
        return self.world.together(lambda: action() if self.world.is_main else None)[0]


@contextmanager
def explained(what: str) -> Iterator[None]:
    """An error of the disk as one sentence."""
    try:
        yield
    except OSError as error:
        raise ClearheadError(f"{what}: {error.strerror or error}") from error
