"""Run `clearhead` in a fork of this process, which has imported torch already: a new interpreter needs seconds for it.

done = run_forked("generate", folder, "Hello"); done.returncode, done.stdout, done.stderr
"""

import contextlib
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import IO
from unittest import mock

from clearhead.cli import main

# A fork has none of the threads of this process, and must not wait for them.
_ONE_THREAD = {"CLEARHEAD_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def run_forked(*arguments: object, stdin: str = "") -> SimpleNamespace:
    """Return the exit code and the output of a command that runs in a process of its own, with its own streams."""

    def run() -> None:
        sys.argv = ["clearhead", *map(str, arguments)]
        main()

    return call_in_fork(run, stdin)


def call_in_fork(action: Callable[[], object], stdin: str = "") -> SimpleNamespace:
    """Return the exit code and the output of a function that is called in a process of its own."""
    with _temporary_file(stdin) as source, _temporary_file() as out, _temporary_file() as err:
        with warnings.catch_warnings(), mock.patch.dict(os.environ, _ONE_THREAD):
            warnings.simplefilter("ignore")  # about threads
            process = os.fork()
            if not process:
                _call(action, source, out, err)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        return SimpleNamespace(returncode=code, stdout=_content(out), stderr=_content(err))


@contextlib.contextmanager
def _temporary_file(content: str = "") -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        file.write(content.encode())
        file.flush()
        file.seek(0)
        yield file


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def _call(action: Callable[[], object], *files: IO[bytes]) -> None:
    """Call a function with these files as standard streams, and end this process."""
    code: object = 99
    try:
        for descriptor, file in enumerate(files):
            os.dup2(file.fileno(), descriptor)
        sys.stdin, sys.stdout, sys.stderr = (
            open(descriptor, "r" if descriptor == 0 else "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            for descriptor in range(3)
        )
        try:
            action()
            code = 0
        except SystemExit as error:
            code = error.code or 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code if isinstance(code, int) else 1)
