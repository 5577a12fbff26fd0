"""A checkpoint as it lies on the disk: checked against its manifest, read whole or only in the part that is asked for.

verify(folder)                                     # raises where a file is missing, cut, changed or of another save
saved = Saved(folder); saved.step; saved.state; saved.tensors("weights")
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.files import parse_json, read_json
from clearhead.training.checkpoints.files import Written, read_back
from clearhead.training.distributed import Box, World

MANIFEST, STATE = "manifest.json", "state.json"
FORMAT = 1
OF_EACH_PART = "randomness"  # the group of which every process with rows of its own has its own


def check_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, if it is ours and every file that it names is there with its size."""
    manifest = read_json(folder / MANIFEST)
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise ClearheadError(f"{folder} has format {found!r}; this version reads {FORMAT}")
    try:
        step, num_parts = int(manifest["step"]), int(manifest["parts"])
        files = {str(name): Written(entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ClearheadError(f"{folder / MANIFEST} is damaged") from None
    if folder.name != f"step-{step:08d}" or num_parts < 1 or STATE not in files:
        raise ClearheadError(f"{folder / MANIFEST} belongs to another checkpoint, of step {step}")
    for name, entry in files.items():
        path = folder / name
        if path.parent != folder or not path.is_file():
            raise ClearheadError(f"{path} is missing")
        if path.stat().st_size != entry.num_bytes:
            raise ClearheadError(f"{path} has {path.stat().st_size} bytes where {entry.num_bytes} were written")
    return manifest


def verify(folder: Path) -> None:
    """That every byte of a checkpoint is as it was written."""
    for name, entry in check_manifest(folder)["files"].items():
        if read_back(folder / name).sha256 != entry["sha256"]:
            raise ClearheadError(f"{folder / name} is damaged: its sha256 is not the one in {MANIFEST}")


class Saved:
    def __init__(self, folder: Path, world: World | None = None):
        self.folder, self.world = folder, world or World.alone()
        self.manifest = check_manifest(folder)
        self.step: int = self.manifest["step"]

    @cached_property
    def state(self) -> dict[str, Any]:
        return read_json(self.folder / STATE)

    @property
    def num_parts(self) -> int:
        """Among how many processes the rows of a batch were divided."""
        return self.manifest["parts"]

    def tensors(self, group: str, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The tensors of a group: whole and on the CPU, or sliced as the weights of their names in `like` are.

        Randomness is that of the processes which read the same part of every batch, and empty where the number of
        parts was another.
        """
        paths = [self.folder / name for name, entry in self.manifest["files"].items() if entry.get("group") == group]
        if not paths:
            raise ClearheadError(f"{self.folder} holds no {group}")
        with ExitStack() as stack:
            stored = stored_tensors([open_file(path, stack) for path in paths])
            if group == OF_EACH_PART:
                return self.own(stored)
            return {name: self.placed(pieces, weight_of(name, like or {})) for name, pieces in stored.items()}

    def own(self, stored: "Mapping[str, list[StoredPiece]]") -> dict[str, Tensor]:
        if self.num_parts != self.world.data_size:
            return {}
        prefix = f"{self.world.data_rank}/"
        return {name.removeprefix(prefix): read(stored[name]) for name in stored if name.startswith(prefix)}

    def placed(self, pieces: "list[StoredPiece]", weight: Tensor | None) -> Tensor:
        """As this process holds the weight; what an optimizer keeps of it is of its shape, or one number and whole."""
        box = None if weight is None else self.world.box(weight)
        if weight is None or box is None or box.whole != pieces[0].whole:
            return read(pieces)
        return self.world.as_held(read(pieces, box), weight)


def weight_of(name: str, weights: Mapping[str, Tensor]) -> Tensor | None:
    """The weight that a tensor of this name is, or belongs to: `a.weight` for `a.weight/exp_avg`."""
    return weights.get(name, weights.get(name.rpartition("/")[0]))


@dataclass(frozen=True)
class StoredPiece:
    """One file's share of a tensor."""

    file: Any
    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]

    def copy_into(self, tensor: Tensor, start: tuple[int, ...]) -> None:
        """What the two have in common; `tensor` begins at `start` of the whole."""
        here, there = [], []
        for mine, length, other, size in zip(self.start, self.shape, start, tensor.shape, strict=True):
            begin, end = max(mine, other), min(mine + length, other + size)
            if begin >= end:
                return
            here.append(slice(begin - mine, end - mine))
            there.append(slice(begin - other, end - other))
        tensor[tuple(there)] = self.file.get_slice(self.name)[tuple(here)]


def open_file(path: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except SafetensorError as error:
        raise ClearheadError(f"{path} is not a safetensors file: {error}") from None


def stored_tensors(files: list[Any]) -> dict[str, list[StoredPiece]]:
    stored: dict[str, list[StoredPiece]] = {}
    for file in files:
        places = parse_json((file.metadata() or {}).get("places", "{}"), "the places of a saved tensor are ")
        for name in file.keys():  # noqa: SIM118 (not a dict)
            shape = tuple(file.get_slice(name).get_shape())
            place = places.get(name, {"start": (0,) * len(shape), "whole": shape})
            piece = StoredPiece(file, name, tuple(place["start"]), shape, tuple(place["whole"]))
            stored.setdefault(name, []).append(piece)
    return stored


def read(pieces: list[StoredPiece], box: Box | None = None) -> Tensor:
    """A tensor, or the box of it that is asked for, from the pieces it was saved in."""
    first = pieces[0]
    whole = Box((0,) * len(first.whole), first.whole, first.whole)
    if len(pieces) == 1 and box in (None, whole):
        return first.file.get_tensor(first.name)
    box = box or whole
    tensor = torch.empty(box.shape, dtype=first.file.get_slice(first.name)[:1].dtype)
    for piece in pieces:
        piece.copy_into(tensor, box.start)
    return tensor
