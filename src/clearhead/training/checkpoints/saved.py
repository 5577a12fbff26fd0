"""Read a saved checkpoint: verify it against its manifest, and load tensors in full or only the part of one process.

verify_checkpoint(folder)                     # raises if a file is missing, truncated, changed or of another save
saved = SavedCheckpoint(folder); saved.step; saved.state; saved.tensors("weights")
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import ClearheadError, quote
from clearhead.files import parse_json, read_json
from clearhead.tensor_files import SafetensorsFile
from clearhead.training.checkpoints.files import FileDigest, digest_file
from clearhead.training.distributed import World
from clearhead.training.tensor_slice import TensorSlice

MANIFEST_FILE, STATE_FILE = "manifest.json", "state.json"
FORMAT = 1
RANDOM_STATE_GROUP = "randomness"  # stored once for each data rank; all other groups are stored once


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest. Raise ClearheadError if it is invalid or a file is missing or has another size."""
    path = folder / MANIFEST_FILE
    manifest = read_json(path)
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise ClearheadError(f"{folder} has format {quote(found)}; this version reads format {FORMAT}")
    try:
        step, num_data_ranks = int(manifest["step"]), int(manifest["parts"])
        files = {str(name): FileDigest(entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ClearheadError(f"{path} is damaged") from None
    if folder.name != f"step-{step:08d}" or num_data_ranks < 1 or STATE_FILE not in files:
        raise ClearheadError(f"{path} belongs to another checkpoint, of step {step}")
    for name, entry in files.items():
        path = folder / name
        if path.parent != folder or not path.is_file():
            raise ClearheadError(f"{path} is missing")
        if path.stat().st_size != entry.num_bytes:
            raise ClearheadError(f"{path} has {path.stat().st_size} bytes, but {entry.num_bytes} were written")
    return manifest


def verify_checkpoint(folder: Path) -> None:
    """Read every byte of a checkpoint and raise ClearheadError if one differs from what was written."""
    for name, entry in read_manifest(folder)["files"].items():
        if digest_file(folder / name).sha256 != entry["sha256"]:
            raise ClearheadError(f"{folder / name} is damaged: its sha256 differs from {MANIFEST_FILE}")


class SavedCheckpoint:
    """A checkpoint on disk, as one process reads it."""

    def __init__(self, folder: Path, world: World | None = None):
        self.folder, self.world = folder, world or World.single_process()
        self.manifest = read_manifest(folder)
        self.step: int = self.manifest["step"]

    @cached_property
    def state(self) -> dict[str, Any]:
        """The JSON state that was saved with the tensors."""
        state = read_json(self.folder / STATE_FILE)
        if not isinstance(state, dict):
            raise ClearheadError(f"{self.folder / STATE_FILE} is damaged: it must contain a JSON object")
        return state

    def state_table(self, name: str) -> dict[str, Any]:
        """Return a table of the state. Raise ClearheadError if it is missing."""
        table = self.state.get(name)
        if not isinstance(table, dict):
            raise ClearheadError(f"{self.folder / STATE_FILE} is damaged: it has no table {quote(name)}")
        return table

    @property
    def num_data_ranks(self) -> int:
        """Number of processes that read different rows when the checkpoint was written."""
        return self.manifest["parts"]

    def tensors(self, group: str, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the tensors of a group on the CPU, in full or sharded like the `weights` of their names.

        The random state is that of this process's data rank; it is empty if the number of data ranks has changed.
        """
        paths = [self.folder / name for name, entry in self.manifest["files"].items() if entry.get("group") == group]
        if not paths:
            raise ClearheadError(f"{self.folder} contains no tensors of the group {quote(group)}")
        stored = find_pieces([SafetensorsFile(path) for path in paths])
        if group == RANDOM_STATE_GROUP:
            return self._own_random_state(stored)
        return {name: self._read_local(pieces, find_weight(name, weights or {})) for name, pieces in stored.items()}

    def _own_random_state(self, stored: "Mapping[str, list[StoredPiece]]") -> dict[str, Tensor]:
        if self.num_data_ranks != self.world.num_data_ranks:
            return {}
        prefix = f"{self.world.data_rank}/"
        return {name.removeprefix(prefix): assemble(stored[name]) for name in stored if name.startswith(prefix)}

    def _read_local(self, pieces: "list[StoredPiece]", weight: Tensor | None) -> Tensor:
        """Return a tensor in the form in which this process holds its weight.

        An optimizer's tensor has either the shape of its weight, or is a single number that is not sharded.
        """
        part = None if weight is None else self.world.slice_of(weight)
        if weight is None or part is None or part.full_shape != pieces[0].part.full_shape:
            return assemble(pieces)
        return self.world.shard_like(assemble(pieces, part), weight)


def find_weight(name: str, weights: Mapping[str, Tensor]) -> Tensor | None:
    """Return the weight with this name, or the one that an optimizer tensor belongs to: `a` for `a/exp_avg`."""
    return weights.get(name, weights.get(name.rpartition("/")[0]))


@dataclass(frozen=True)
class StoredPiece:
    """The part of a tensor that one file contains."""

    file: SafetensorsFile
    name: str
    part: TensorSlice

    def copy_overlap(self, tensor: Tensor, start: tuple[int, ...]) -> None:
        """Copy the overlap of this piece and `tensor`, which begins at `start` of the full tensor."""
        source, target = [], []
        for own_start, own_length, other_start, other_length in zip(
            self.part.start, self.part.shape, start, tensor.shape, strict=True
        ):
            begin, end = max(own_start, other_start), min(own_start + own_length, other_start + other_length)
            if begin >= end:
                return
            source.append(slice(begin - own_start, end - own_start))
            target.append(slice(begin - other_start, end - other_start))
        rows, *others = source
        tensor[tuple(target)] = self.file.read_rows(self.name, rows.start, rows.stop)[:, *others]


def find_pieces(files: list[SafetensorsFile]) -> dict[str, list[StoredPiece]]:
    """Return the pieces of each tensor in several files. The metadata `places` describe the shards among them."""
    stored: dict[str, list[StoredPiece]] = {}
    for file in files:
        places = parse_json(file.metadata.get("places", "{}"), "the metadata of a saved tensor is ")
        for name in file.names:
            shape = file.shape(name)
            try:
                place = places.get(name, {"start": (0,) * len(shape), "whole": shape})
                part = TensorSlice(tuple(place["start"]), shape, tuple(place["whole"]))
            except (AttributeError, KeyError, TypeError):
                raise ClearheadError(f"the saved tensor {quote(name)} has damaged metadata") from None
            stored.setdefault(name, []).append(StoredPiece(file, name, part))
    for name, pieces in stored.items():
        _check_pieces(name, [piece.part for piece in pieces])
    return stored


def _check_pieces(name: str, parts: list[TensorSlice]) -> None:
    """Raise ClearheadError unless the pieces of a tensor lie inside it and have its number of elements."""
    full_shape = parts[0].full_shape
    for part in parts:
        numbers = (*part.start, *part.full_shape)
        fits = all(type(number) is int and number >= 0 for number in numbers) and part.full_shape == full_shape
        fits = fits and len(part.start) == len(part.shape) == len(full_shape)
        ends = zip(part.start, part.shape, full_shape, strict=fits)
        if not fits or any(start + length > size for start, length, size in ends):
            raise ClearheadError(f"the saved tensor {quote(name)} has damaged metadata")
    if sum(math.prod(part.shape) for part in parts) != math.prod(full_shape):
        raise ClearheadError(f"pieces of the saved tensor {quote(name)} are missing")


def assemble(pieces: list[StoredPiece], part: TensorSlice | None = None) -> Tensor:
    """Return a tensor, or a part of it, from the pieces in which it was saved."""
    first = pieces[0]
    full = TensorSlice.full(first.part.full_shape)
    if len(pieces) == 1 and part in (None, full):
        return first.file.read(first.name)
    part = part or full
    tensor = torch.empty(part.shape, dtype=first.file.read_rows(first.name, 0, 1).dtype)
    for piece in pieces:
        piece.copy_overlap(tensor, part.start)
    return tensor
