"""Simulate failing disks: raise an error or kill the process at a chosen write, fsync or rename."""

import errno
import os
import warnings
from dataclasses import dataclass, field

from clearhead.training.checkpoints.files import FileSystem


@dataclass
class FaultyFileSystem(FileSystem):
    """Fails at operation number `fail_at`; a failing write has written half of its bytes. None only counts."""

    fail_at: int | None = None
    error: int = errno.ENOSPC
    kills: bool = False  # exit the process instead of raising an error, as kill -9 would
    after_operation: bool = False  # complete the operation before failing
    operations: list[str] = field(default_factory=list)

    def write(self, file, chunk):
        complete = super().write
        self.perform("write", lambda: complete(file, chunk), lambda: file.write(chunk[: len(chunk) // 2]))

    def fsync(self, descriptor):
        complete = super().fsync
        self.perform("fsync", lambda: complete(descriptor))

    def rename(self, old, new):
        complete = super().rename
        self.perform("rename", lambda: complete(old, new))

    def perform(self, name, operation, half_of_it=lambda: None):
        number = len(self.operations)
        self.operations.append(name)
        if number != self.fail_at or self.after_operation:
            operation()
        if number == self.fail_at:
            if not self.after_operation:
                half_of_it()
            if self.kills:
                os._exit(9)
            raise OSError(self.error, os.strerror(self.error))


def fork_child(action):
    """Fork a process that runs an action, and return its id. Its exit code is the action's result, 99 on an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning about torch's threads, which the child does not use
        process = os.fork()
    if process:
        return process
    code = 99
    try:
        code = action() or 0
    except SystemExit as error:
        code = error.code
    finally:
        os._exit(code)


def exit_code(process):
    """Wait for a child process and return its exit code, negative if a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
