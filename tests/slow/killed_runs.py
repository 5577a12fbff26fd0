"""Kill training with SIGKILL at random moments, resume it, and compare the end with a run that was never killed.

    python -m tests.slow.killed_runs --kills 1000              # --jobs 8 on a machine with as many cores

A quarter of the kills come after a random time. The others wait for a phase of the run (start, fork, resume, step,
validate, save, finish) and strike at a random moment of it. After each kill, the script checks that nothing was lost:

    - every checkpoint that the run lists is intact, and the newest is not older than before the kill;
    - metrics.jsonl still has every row up to the newest checkpoint, with the numbers of the reference run;
    - the model folder is complete or absent.

A run is resumed until it ends. Then every file of its folder must equal that of the reference run byte for byte,
except for the lock and the measured times in metrics.jsonl. No process may be left behind.
"""

import argparse
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from clearhead.errors import ClearheadError
from clearhead.training import Recipe, loop
from clearhead.training.checkpoints import RunFolder
from clearhead.training.checkpoints.saved import verify_checkpoint
from clearhead.training.metrics import read_metrics
from tests.slow.run_phases import PHASES, PhaseBoard, announced_phases
from tests.slow.training_recipes import write_recipes
from tests.training.faulty_disk import fork_child
from tests.training.recipes import quiet_console

REPEATED = ("step", "validate", "save")  # phases that a run enters several times
MEASURED = ("tokens_per_second", "seconds_left", "memory_bytes", "mfu")  # columns of metrics.jsonl that depend on time
MAX_RUN_SECONDS = 300


class KilledRun:
    """One folder that is trained, killed and resumed until the run ends."""

    def __init__(self, recipe: Recipe, folder: Path, board: PhaseBoard):
        self.recipe, self.folder, self.board = recipe, folder, board
        self.groups: list[int] = []  # process groups that the run started

    def start(self) -> int:
        """Start or resume the run in a process group of its own, and return the id of the process."""
        self.board.clear()

        def work() -> None:
            os.setpgid(0, 0)
            try:
                with announced_phases(self.board):
                    loop.train(self.recipe, self.folder, quiet_console())
            except BaseException:
                traceback.print_exc()
                raise

        process = fork_child(work)
        self.groups.append(process)
        return process

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint, 0 if there is none. Raise ClearheadError if one is damaged."""
        folders = RunFolder(self.folder).checkpoint_folders()
        for folder in folders:
            verify_checkpoint(folder)
        return int(folders[0].name.removeprefix("step-")) if folders else 0

    def run_until(self, moment: Callable[[PhaseBoard], bool]) -> tuple[int | None, str]:
        """Run until a moment and kill; return the exit code if the run ended before, and the phase that was struck."""
        process, started = self.start(), time.monotonic()
        while time.monotonic() - started < MAX_RUN_SECONDS:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status), self.board.phase
            if moment(self.board):
                os.kill(process, signal.SIGKILL)
                code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                return (None if code == -signal.SIGKILL else code), self.board.phase
            time.sleep(0.0005)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        raise AssertionError(f"a run in {self.folder} hung in the phase {self.board.phase}")


def random_moment(chance: random.Random, seconds: float, phases: list[str]) -> Callable[[PhaseBoard], bool]:
    """Return a function that says when to kill a run which would take `seconds`."""
    started = time.monotonic()
    if chance.random() < 0.25:
        delay = chance.uniform(0, seconds)
        return lambda board: time.monotonic() - started > delay
    phase, delay = chance.choice(phases), chance.uniform(0, 0.02)
    number = chance.randint(1, 2) if phase in REPEATED else 1
    entered: list[float] = []

    def strikes(board: PhaseBoard) -> bool:
        if not entered and board.count(phase) >= number:
            entered.append(time.monotonic())
        return bool(entered) and time.monotonic() - entered[0] > delay

    return strikes


def plain_rows(folder: Path, last_step: int) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl up to a step, without measured times."""
    rows = [row for row in read_metrics(folder) if row["step"] <= last_step]
    return [{name: value for name, value in row.items() if name not in MEASURED} for row in rows]


def folder_content(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder by its relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def check_after_kill(run: KilledRun, reference: Path, before: int) -> int:
    """Raise AssertionError if a kill lost something; return the step of the newest checkpoint."""
    step = run.newest_step()
    assert step >= before, f"the newest checkpoint was of step {before} and is now of step {step}"
    rows, expected = plain_rows(run.folder, step), plain_rows(reference, step)
    assert rows == expected, f"metrics.jsonl up to step {step} differs from the reference"
    model = run.folder / "model"
    if model.exists():
        assert folder_content(model) == folder_content(reference / "model"), "the model folder is incomplete"
    return step


def check_end(run: KilledRun, reference: Path) -> None:
    """Raise AssertionError unless the folder of a run equals that of the reference."""
    ours, theirs = (folder_content(folder) for folder in (run.folder, reference))
    for content in (ours, theirs):
        del content["lock"], content["metrics.jsonl"]
    assert ours.keys() == theirs.keys(), f"these files differ: {sorted(ours.keys() ^ theirs.keys())}"
    changed = [name for name in ours if ours[name] != theirs[name]]
    assert not changed, f"these files differ from the reference: {', '.join(changed)}"
    last = run.recipe.train.steps
    assert plain_rows(run.folder, last) == plain_rows(reference, last), "metrics.jsonl differs from the reference"


def living_groups(groups: list[int]) -> list[int]:
    """Return the process groups that still have a process."""
    living = []
    for group in groups:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            continue
        living.append(group)
    return living


def kill_many(num_kills: int, folder: Path, seed: int = 0, report: Callable[[str], None] = print) -> Counter[str]:
    """Kill runs `num_kills` times, and check each of them; return the number of kills by phase, and of runs."""
    torch.set_num_threads(1)  # a forked process must not depend on threads of its parent
    chance, counts = random.Random(seed), Counter[str]()
    recipes = write_recipes(folder / "data")
    for name, recipe in recipes.items():  # import all modules once, not in every forked process
        loop.train(recipe, folder / "first" / name, quiet_console())
    board = PhaseBoard()
    groups: list[int] = []
    references: dict[str, tuple[Path, float, list[str]]] = {}
    for name, recipe in recipes.items():
        path = folder / "reference" / name
        started = time.monotonic()
        code, _ = KilledRun(recipe, path, board).run_until(lambda _: False)
        assert code == 0, f"the reference run of {name!r} ended with exit code {code}"
        phases = [phase for phase in PHASES if board.count(phase) and phase != "end"]
        references[name] = path, time.monotonic() - started, phases
        report(f"reference  {name:28} {references[name][1]:.2f} s, phases {', '.join(phases)}")
    while counts["kills"] < num_kills:
        name = chance.choice(list(recipes))
        reference, seconds, phases = references[name]
        run, step, own_kills = KilledRun(recipes[name], folder / f"run-{counts['runs']}", board), 0, 0
        while True:
            possible = [*phases, "resume"] if step else phases
            strikes = random_moment(chance, seconds, possible) if counts["kills"] < num_kills else lambda _: False
            code, phase = run.run_until(strikes)
            if code is not None:
                break
            counts["kills"] += 1
            counts[f"in {phase}"] += 1
            own_kills += 1
            step = check_after_kill(run, reference, step)
        assert code == 0, f"a resumed run of {name!r} ended with exit code {code}"
        check_end(run, reference)
        counts["runs"] += 1
        groups += run.groups
        report(f"run {counts['runs']:4}  {name:28} {own_kills:3} kills, {counts['kills']} in all, equal in the end")
        remove(run.folder)
    deadline = time.monotonic() + 30
    while (left := living_groups(groups)) and time.monotonic() < deadline:
        time.sleep(0.5)  # data workers notice within five seconds that their run is gone
    assert not left, f"{len(left)} process groups of killed runs are still there"
    return counts


def remove(folder: Path) -> None:
    """Delete the folder of a finished run."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def kill_in_parallel(num_kills: int, jobs: int, folder: Path, seed: int) -> Counter[str]:
    """Share the kills among several processes of this script, each with moments of its own; return all counts."""
    shares = [num_kills // jobs + (number < num_kills % jobs) for number in range(jobs)]
    processes = []
    for number, share in enumerate(shares):
        options = ["--kills", str(share), "--seed", str(1000 * seed + number), "--folder", str(folder / str(number))]
        command = [sys.executable, "-m", "tests.slow.killed_runs", *options]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    counts = Counter[str]()
    for process in processes:
        output, _ = process.communicate()
        assert process.returncode == 0, "one of the processes failed; its message is above"
        counts.update(json.loads(output))
    del counts["seconds"]
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="number of kills")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs that are killed at a time")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--folder", type=Path, help="where to train; a temporary folder by default")
    options = parser.parse_args()
    gc.freeze()  # forked processes share the memory of this one
    with tempfile.TemporaryDirectory() as temporary:
        started, folder = time.monotonic(), options.folder or Path(temporary)
        try:
            if options.jobs > 1:
                counts = kill_in_parallel(options.kills, options.jobs, folder, options.seed)
            else:
                counts = kill_many(options.kills, folder, options.seed, report=report_line)
        except (AssertionError, ClearheadError) as error:
            print(f"failed: {error}", file=sys.stderr)
            return 1
        finally:
            gc.unfreeze()  # libraries complain about objects that are left at the end
    print(json.dumps({**counts, "seconds": round(time.monotonic() - started)}))
    return 0


def report_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
