"""How many threads compute: the setting, the environment variable, control groups; and that waiting threads sleep."""

import os
import subprocess
import sys
import time

import pytest
import torch

import clearhead
from clearhead import threads
from clearhead.cli.threads import takes_threads
from clearhead.errors import ClearheadError


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Let no number be chosen yet, and restore that of the tests afterwards."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "_chosen", False)
    for name in ("CLEARHEAD_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    yield
    torch.set_num_threads(before)


def test_the_number_can_be_set_and_is_not_changed_afterwards(monkeypatch):
    clearhead.set_threads(3)
    assert torch.get_num_threads() == 3
    monkeypatch.setenv("CLEARHEAD_THREADS", "5")
    threads.use_default_threads()
    assert torch.get_num_threads() == 3


def test_the_environment_variable_sets_the_number(monkeypatch):
    monkeypatch.setenv("CLEARHEAD_THREADS", "5")
    threads.use_default_threads()
    assert torch.get_num_threads() == 5


def test_a_command_may_have_a_default_of_its_own(monkeypatch):
    used = []
    command = takes_threads(lambda: used.append(torch.get_num_threads()), default=2)
    command(threads=None)
    command(threads=3)
    monkeypatch.setenv("CLEARHEAD_THREADS", "4")
    monkeypatch.setattr(threads, "_chosen", False)
    command(threads=None)
    assert used == [2, 3, 4]


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "2", 5000])
def test_an_impossible_number_is_refused(number):
    with pytest.raises(ClearheadError, match="it must be an integer from 1 to 1024"):
        clearhead.set_threads(number)


@pytest.mark.parametrize("text", ["", "0", "many", "2.5", "-1", "9999"])
def test_an_impossible_environment_variable_is_refused(monkeypatch, text):
    monkeypatch.setenv("CLEARHEAD_THREADS", text)
    with pytest.raises(ClearheadError, match=r"CLEARHEAD_THREADS is .*; it must be an integer from 1 to 1024"):
        threads.use_default_threads()


@pytest.mark.parametrize(("variable", "expected"), [(None, 2), ("7", 4)])
def test_a_container_limit_counts_unless_somebody_chose_a_number(monkeypatch, variable, expected):
    monkeypatch.setattr(threads, "_num_schedulable_cpus", lambda: 4)
    monkeypatch.setattr(threads, "available_cpus", lambda: 2)
    torch.set_num_threads(4)  # as PyTorch starts on 4 CPUs
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    threads.use_default_threads()
    assert torch.get_num_threads() == expected


def test_a_number_that_the_program_set_in_torch_is_kept(monkeypatch):
    monkeypatch.setattr(threads, "_num_schedulable_cpus", lambda: 4)
    monkeypatch.setattr(threads, "available_cpus", lambda: 2)
    torch.set_num_threads(3)
    threads.use_default_threads()
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2.0),
        ("0::/not/mounted/here", {"cpu.max": "50000 100000"}, 0.5),
        (
            "4:memory:/x\n3:cpu,cpuacct:/x",
            {"cpu/x/cpu.cfs_quota_us": "300000", "cpu/x/cpu.cfs_period_us": "100000"},
            3.0,
        ),
        ("3:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("0::/", {}, None),
        ("0::/", {"cpu.max": "nonsense"}, None),
    ],
)
def test_limits_of_control_groups(tmp_path, membership, files, limit):
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert threads._control_group_limit(tmp_path / "membership", tmp_path / "root") == limit


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert threads._control_group_limit(tmp_path / "missing", tmp_path) is None


SPIN = """
import os, sys, time
{first}
import torch, clearhead
torch.set_num_threads(2)
x = torch.ones(1 << 22)
x.add_(1)
for _ in range(20):
    x.add_(1)
    started = time.process_time()
    time.sleep(0.005)  # a thread that spins uses the CPU meanwhile
    idle = time.process_time() - started
    print(idle)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux") or os.cpu_count() == 1, reason="two threads of libgomp")
def test_waiting_threads_sleep_if_clearhead_is_imported_before_torch():
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    idle = {}
    for first in ("import clearhead", "pass"):
        done = subprocess.run(
            [sys.executable, "-c", SPIN.format(first=first)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        idle[first] = sorted(map(float, done.stdout.split()))[10]
    assert idle["import clearhead"] < 0.002
    assert idle["pass"] > 2 * idle["import clearhead"]


@pytest.mark.parametrize(
    ("cpus", "available", "samples", "contended"),
    [
        (2, 2, [0], False),
        (2, 2, [1, 1, 1, 1, 1], True),
        (2, 2, [1, 0, 0, 0, 1], False),  # something ran for a moment
        (64, 4, [60], False),  # a container on a large machine
        (64, 4, [61, 61, 61, 60, 61], True),
    ],
)
def test_cpus_are_contended_if_others_run_on_those_that_our_threads_need(
    monkeypatch, cpus, available, samples, contended
):
    remaining = iter(samples)
    monkeypatch.setattr(threads.os, "cpu_count", lambda: cpus)
    monkeypatch.setattr(threads, "available_cpus", lambda: available)
    monkeypatch.setattr(threads, "_num_other_running_threads", lambda: next(remaining))
    assert threads._cpus_are_contended() == contended
    assert list(remaining) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's /proc")
def test_running_threads_are_counted():
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        deadline = time.monotonic() + 30
        while threads._num_other_running_threads() < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threads._num_other_running_threads() >= 3
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_the_users_own_openmp_settings_are_kept():
    for name, value in (("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "7")):
        environment = {key: text for key, text in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
        code = "import clearhead, os; print(os.environ.get('GOMP_SPINCOUNT'))"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment | {name: value}, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == ["7" if name == "GOMP_SPINCOUNT" else "None"]


@pytest.mark.parametrize(
    ("options", "variable", "expected"),
    [(["--threads", "3"], "2", "3"), ([], "2", "2"), (["--threads", "0"], "2", None)],
)
def test_the_option_is_applied_before_torch_is_imported(options, variable, expected):
    """The command fails after its checks, before it loads anything."""
    code = (
        "import sys; sys.argv[0] = 'clearhead'\n"
        "import clearhead.cli.generate as g, os\n"
        "g.check_model_options = lambda *given: (print('torch' in sys.modules, os.environ.get('OMP_NUM_THREADS')), "
        "sys.exit(0))\n"
        "from clearhead.cli import main; main()"
    )
    environment = {key: text for key, text in os.environ.items() if not key.startswith("OMP_")}
    command = [sys.executable, "-c", code, "generate", "smollm2", "x", *options]
    environment["CLEARHEAD_THREADS"] = variable
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if expected is None:
        assert done.returncode == 1
        assert done.stderr == "error: --threads is 0; it must be an integer from 1 to 1024\n"
    else:
        assert done.stdout.split() == ["False", expected], done.stderr
