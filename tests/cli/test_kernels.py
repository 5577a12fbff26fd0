"""What a command says about the CPU kernels, in a home folder where they have not been compiled."""

import os
import subprocess
import sys
import time

import pytest

BEING_COMPILED = (
    "note: the CPU kernels are being compiled in the background, once; until they are ready, PyTorch computes"
)


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a command with a compiler of this name, or a script of this text."""

    def run(compiler, *arguments, **variables):
        if compiler.startswith("#!"):
            (tmp_path / "compiler").write_text(compiler)
            (tmp_path / "compiler").chmod(0o700)
            compiler = str(tmp_path / "compiler")
        environment = os.environ | {"CLEARHEAD_HOME": str(tmp_path / "home"), "CXX": compiler} | variables
        if "CLEARHEAD_COMPILE" not in variables:
            environment.pop("CLEARHEAD_COMPILE", None)
        command = [sys.executable, "-m", "clearhead", "generate", "capitals", "<U> word", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


def test_the_first_command_says_once_that_the_kernels_are_being_compiled(run, tmp_path):
    """The compiler goes on after the command has ended."""
    wait = f"for i in $(seq 600); do [ -e {tmp_path}/ended ] && break; sleep 0.1; done"
    done = run(f"#!/bin/sh\n{wait}\ntouch {tmp_path}/compiled\nexit 1\n")
    assert done.stdout == "WORD\n"
    assert [line.startswith(BEING_COMPILED) for line in done.stderr.splitlines()].count(True) == 1
    assert not (tmp_path / "compiled").exists()
    (tmp_path / "ended").touch()
    deadline = time.monotonic() + 60
    while not (tmp_path / "compiled").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (tmp_path / "compiled").exists()


@pytest.mark.parametrize(("arguments", "variables"), [(["--no-fast"], {}), ([], {"CLEARHEAD_COMPILE": "0"})])
def test_nothing_is_compiled_or_said_if_the_user_does_not_want_it(run, tmp_path, arguments, variables):
    done = run(f"#!/bin/sh\ntouch {tmp_path}/compiled\nexit 1\n", *arguments, **variables)
    assert done.stdout == "WORD\n"
    assert done.stderr == ""
    assert not (tmp_path / "compiled").exists()


def test_waiting_for_a_compiler_that_fails_is_an_error(run):
    done = run("false", "--fast")
    assert done.returncode == 1
    assert done.stderr.startswith("error: false cannot compile the CPU kernels")


def test_a_compiler_that_failed_is_named_by_the_next_command(run, tmp_path):
    run("false")
    deadline = time.monotonic() + 60
    while not list((tmp_path / "home").rglob("*.failed")) and time.monotonic() < deadline:
        time.sleep(0.1)
    done = run("false")
    assert done.stdout == "WORD\n"
    assert done.stderr.startswith("note: false cannot compile the CPU kernels")
    assert "PyTorch computes instead" in done.stderr
