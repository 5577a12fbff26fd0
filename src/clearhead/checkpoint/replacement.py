"""Replace a model folder in one step, so that a kill or a full disk never leaves a mixture of two models.

    with replace_folder(Path("my-model")) as staged:
        save_native(network, staged)

The files are written to a sibling folder, which starts with hard links to all files of the old folder, so files that do
not belong to the model stay. Then the two folders exchange their names. Every file must be written by an atomic rename,
as `clearhead.files` does; writing into a linked file would also change the old folder.
"""

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from clearhead.errors import ClearheadError

if sys.platform != "win32":
    from fcntl import LOCK_EX, LOCK_NB, flock

_STAGED, _PREVIOUS = ".saving", ".previous"
_MARKER = ".save-in-progress"
_MAX_LINKED_FILES = 10_000  # a folder with more files is not a model folder; it is written in place
_EXCHANGE_FLAG = 2  # RENAME_EXCHANGE of Linux and RENAME_SWAP of macOS
_AT_FDCWD = -100


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Provide a folder to write to; it replaces `folder` when the block ends, and is deleted after an error.

    The files of a folder that cannot be replaced are renamed one by one: a mount point, the working directory, a folder
    of another user. If that is interrupted, `check_complete` rejects the folder.
    """
    try:
        folder = folder.resolve()  # a link to a folder stays a link
        folder.parent.mkdir(parents=True, exist_ok=True)
        restore_previous(folder)
        if folder.exists() and not _is_replaceable(folder):
            with _staging_folder(folder / folder.name) as staged:
                _link_files(folder, staged, with_folders=False)
                yield staged
                _move_files(staged, folder)
            return
        with _staging_folder(folder) as staged:
            if folder.exists():
                _link_files(folder, staged, with_folders=True)
            yield staged
            _sync_folders(staged)
            _swap(staged, folder)
            _sync_folder(folder.parent)
    except OSError as error:
        raise ClearheadError(
            f"the model cannot be saved to {folder}: {error.strerror or error}; choose another folder or free space"
        ) from error


def check_complete(folder: Path) -> None:
    """Raise ClearheadError if the last save to a folder was interrupted while it was written in place."""
    if (folder / _MARKER).exists():
        raise ClearheadError(
            f"{folder} is incomplete: the last save to it was interrupted; save the model again to this folder"
        )


def restore_previous(folder: Path) -> None:
    """Give the old folder its name back if a process was killed between the two renames that replace it.

    This concerns only file systems that cannot exchange two names in one step.
    """
    if folder.exists() or not folder.name:
        return
    with suppress(OSError):
        for previous in _siblings(folder, _PREVIOUS):
            with _locked(previous) as is_abandoned:
                if is_abandoned:
                    previous.rename(folder)
                    return


# --- in place


def _is_replaceable(folder: Path) -> bool:
    """Return whether another folder can take the place of `folder` without surprising its users."""
    is_ours = not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()
    holds_working_directory = Path.cwd().is_relative_to(folder)  # the shell would stay in the deleted folder
    return (
        is_ours
        and not holds_working_directory
        and not folder.is_mount()
        and os.access(folder.parent, os.W_OK)
        and _has_few_files(folder)
    )


def _has_few_files(folder: Path) -> bool:
    num_files = 0
    for _, folders, files in os.walk(folder):
        num_files += len(folders) + len(files)
        if num_files > _MAX_LINKED_FILES:
            return False
    return True


def _move_files(staged: Path, folder: Path) -> None:
    """Give the files directly in `folder` the state of those in `staged`, one by one; add those in its subfolders."""
    (folder / _MARKER).touch()
    _sync_folder(folder)
    for path in _files_of(folder):
        if path.name != _MARKER and not os.path.lexists(staged / path.name):
            path.unlink()
    for path in _files_of(staged):
        path.replace(folder / path.name)
    for subfolder in [path for path in staged.iterdir() if path.is_dir() and not path.is_symlink()]:
        (folder / subfolder.name).mkdir(exist_ok=True)
        for path in _files_of(subfolder):
            path.replace(folder / subfolder.name / path.name)
    _sync_folder(folder)
    (folder / _MARKER).unlink()


def _files_of(folder: Path) -> list[Path]:
    """Return everything directly in a folder but its subfolders."""
    return [path for path in folder.iterdir() if path.is_symlink() or not path.is_dir()]


# --- the sibling folder


@contextmanager
def _staging_folder(folder: Path) -> Iterator[Path]:
    """Create a locked sibling of `folder`; delete whatever has its name in the end, new or old."""
    _remove_leftovers(folder)
    while True:
        staged = folder.with_name(_sibling_name(folder, _STAGED))
        staged.mkdir()
        with _locked(staged) as is_ours:
            if not is_ours:  # another process took it for a leftover before it was locked
                continue
            try:
                yield staged
            finally:
                shutil.rmtree(staged, ignore_errors=True)
            return


def _sibling_name(folder: Path, suffix: str) -> str:
    return f".{folder.name[:100]}.{os.urandom(4).hex()}{suffix}"


def _siblings(folder: Path, suffix: str) -> list[Path]:
    start = f".{folder.name[:100]}."
    return [
        path
        for path in folder.parent.iterdir()
        if path.name.startswith(start) and path.name.endswith(suffix) and len(path.name) == len(start) + 8 + len(suffix)
    ]


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder; yield False if another process has locked or deleted it. A kill releases the lock."""
    if sys.platform == "win32":
        yield True
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            flock(descriptor, LOCK_EX | LOCK_NB)
            is_locked = folder.exists()
        except OSError:
            is_locked = False
        yield is_locked
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    """Delete the sibling folders of killed processes."""
    if sys.platform == "win32":
        return  # a folder in use cannot be told from a leftover
    for leftover in [*_siblings(folder, _STAGED), *_siblings(folder, _PREVIOUS)]:
        with _locked(leftover) as is_abandoned:
            if is_abandoned:
                shutil.rmtree(leftover, ignore_errors=True)


def _link_files(source: Path, target: Path, *, with_folders: bool) -> None:
    """Fill `target` with hard links to the files of `source`; leave out unfinished files of killed processes."""
    folders = (
        [] if with_folders else [path.name for path in source.iterdir() if path.is_dir() and not path.is_symlink()]
    )
    unfinished = shutil.ignore_patterns("*.????????.partial", _MARKER)
    shutil.copytree(
        source,
        target,
        symlinks=True,
        dirs_exist_ok=True,
        copy_function=_link_or_copy,
        ignore=lambda path, names: {*unfinished(path, names), *(folders if path == str(source) else ())},
    )


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target, follow_symlinks=False)


def _swap(staged: Path, folder: Path) -> None:
    """Give `staged` the name of `folder`; the old folder, if there is one, gets the name of `staged`."""
    if not folder.exists():
        staged.rename(folder)
    elif not _exchange(staged, folder):
        previous = folder.with_name(_sibling_name(folder, _PREVIOUS))
        with _locked(folder):
            folder.rename(previous)
            staged.rename(folder)
        _sync_folder(folder.parent)
        previous.rename(staged)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; return False if the system cannot."""
    library = ctypes.CDLL(None) if sys.platform in ("linux", "darwin") else None
    if function := getattr(library, "renameat2", None):
        return bool(function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE_FLAG) == 0)
    if function := getattr(library, "renamex_np", None):
        return bool(function(os.fsencode(one), os.fsencode(other), _EXCHANGE_FLAG) == 0)
    return False


def _sync_folders(folder: Path) -> None:
    for path, _, _ in os.walk(folder):
        _sync_folder(Path(path))


def _sync_folder(folder: Path) -> None:
    """Write the names in a folder to disk. Windows cannot open folders."""
    with suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
