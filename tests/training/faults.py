"""Disks that fail on purpose: at a chosen write, fsync or rename, by an error or by death."""

import errno
import os
import warnings
from dataclasses import dataclass, field

from clearhead.training.checkpoints.files import Files


@dataclass
class Faulty(Files):
    """Fails at operation number `at`, after half of a write's bytes; `at` None: counts only."""

    at: int | None = None
    error: int = errno.ENOSPC
    deadly: bool = False  # os._exit in place of an error, as kill -9 would
    afterwards: bool = False  # the operation happens first
    done: list[str] = field(default_factory=list)

    def write(self, file, chunk):
        self.around(
            "write", lambda: super(Faulty, self).write(file, chunk), lambda: file.write(chunk[: len(chunk) // 2])
        )

    def fsync(self, descriptor):
        self.around("fsync", lambda: super(Faulty, self).fsync(descriptor))

    def rename(self, old, new):
        self.around("rename", lambda: super(Faulty, self).rename(old, new))

    def around(self, name, operation, half=lambda: None):
        number = len(self.done)
        self.done.append(name)
        if number != self.at or self.afterwards:
            operation()
        if number == self.at:
            if not self.afterwards:
                half()
            if self.deadly:
                os._exit(9)
            raise OSError(self.error, os.strerror(self.error))


def in_child(action):
    """The number of a forked process that does this and ends with its answer as exit code, 99 where it raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch has threads; the child uses none of them
        number = os.fork()
    if number:
        return number
    code = 99
    try:
        code = action() or 0
    except SystemExit as leaving:
        code = leaving.code
    finally:
        os._exit(code)


def exit_code(number):
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
