"""How many threads compute on the CPU, and how they wait for each other.

    set_threads(2)

By default there are as many threads as CPUs that the process may use. The number does not depend on how busy they are,
so that results do not either.

A thread that waits for others sleeps soon. OpenMP's threads spin for milliseconds by default: whenever other processes
keep the CPUs busy, they take time from the very threads that they wait for. How soon depends on how busy the CPUs are
when clearhead is imported. Spinning changes the speed only.
"""

import math
import os
import sys
import time
from pathlib import Path

from clearhead.errors import ClearheadError

_VARIABLE = "CLEARHEAD_THREADS"
_MAX_THREADS = 1024
# Turns of OpenMP's waiting loop, each about 25 ns; libgomp's default is 300,000. SmolLM2 on 2 idle cores generates 129
# tokens/s with 10,000 and 93 with 1,000. Both give about 55 beside two busy processes; beside eight, 1,000 gives twice
# as many tokens as 10,000.
_IDLE_SPIN_COUNT, _BUSY_SPIN_COUNT = 10_000, 1_000
_NUM_SAMPLES, _SAMPLE_SECONDS = 5, 0.002

_chosen = False  # whether a number has been chosen for this process


def set_threads(number: int) -> None:
    """Compute with this number of threads on the CPU, in this process."""
    global _chosen
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= _MAX_THREADS:
        raise ClearheadError(f"threads is {number!r}; it must be an integer from 1 to {_MAX_THREADS}")
    _chosen = True
    torch = sys.modules.get("torch")
    if torch is None:
        os.environ["OMP_NUM_THREADS"] = str(number)  # torch reads it when it is imported
    else:
        torch.set_num_threads(number)


def use_configured_threads() -> None:
    """Apply the environment variable CLEARHEAD_THREADS, if it is set and no number has been chosen yet."""
    configured = os.environ.get(_VARIABLE)
    if configured is None or _chosen:
        return
    if not configured.isdecimal() or not 1 <= int(configured) <= _MAX_THREADS:
        raise ClearheadError(f"{_VARIABLE} is {configured!r}; it must be an integer from 1 to {_MAX_THREADS}")
    set_threads(int(configured))


def use_default_threads() -> None:
    """Choose the number of threads unless somebody has: CLEARHEAD_THREADS, or the CPUs that the process may use.

    PyTorch starts one thread for each CPU of the machine, also in a container that may use only some of their time.
    """
    global _chosen
    import torch

    use_configured_threads()
    untouched = "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() == _num_schedulable_cpus()
    if not _chosen and untouched and available_cpus() < torch.get_num_threads():
        torch.set_num_threads(available_cpus())
    _chosen = True


def available_cpus() -> int:
    """Return how many CPUs this process may use: those it may be scheduled on, or fewer if its control group has less.

    Half a CPU counts as one.
    """
    limit = _control_group_limit(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    cpus = _num_schedulable_cpus()
    return cpus if limit is None else max(1, min(cpus, math.ceil(limit)))


def _num_schedulable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _control_group_limit(membership: Path, root: Path) -> float | None:
    """Return the CPUs that control groups (versions 2 and 1 of Linux) allow, or None without a limit.

    membership: the file that names the groups of this process. root: the folder where they are mounted.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base = root
        elif "cpu" in controllers.split(","):
            base = root / "cpu"
        else:
            continue
        folder = base / group.lstrip("/")
        # A limit of an enclosing group counts too. In a container, the group itself may be mounted at the root.
        limits += [_read_limit(each) for each in (folder, *folder.parents) if each == base or base in each.parents]
    return min((limit for limit in limits if limit is not None), default=None)


def _read_limit(folder: Path) -> float | None:
    """Return the CPUs that one control group allows, or None without a limit."""
    try:
        if (file := folder / "cpu.max").exists():
            quota, period = file.read_text(encoding="utf-8").split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8") for name in ("quota", "period")
            )
        return float(quota) / float(period) if float(quota) > 0 and float(period) > 0 else None
    except (OSError, ValueError):  # ValueError: "max", which means no limit
        return None


def shorten_spinning() -> None:
    """Let threads that wait sleep soon, unless the user has configured OpenMP. Call it before torch is imported."""
    if "torch" not in sys.modules and not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = str(_BUSY_SPIN_COUNT if _cpus_are_contended() else _IDLE_SPIN_COUNT)


def _cpus_are_contended() -> bool:
    """Return whether other processes are running on the CPUs that our threads need, in most of a few samples."""
    num_free = (os.cpu_count() or 1) - available_cpus()
    num_contended = 0
    for sample in range(_NUM_SAMPLES):
        if _num_other_running_threads() <= num_free:
            if not sample:
                return False
        else:
            num_contended += 1
        time.sleep(_SAMPLE_SECONDS)
    return num_contended > _NUM_SAMPLES // 2


def _num_other_running_threads() -> int:
    """Return how many threads besides this one run or wait for a CPU of the machine; 0 if that is not known."""
    try:
        running, _, _ = Path("/proc/loadavg").read_text(encoding="utf-8").split()[3].partition("/")
        return int(running) - 1
    except (OSError, ValueError, IndexError):
        return 0
