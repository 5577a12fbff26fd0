"""One server in several processes, which torchrun starts: each holds a shard of the model.

    exit_code = run_follower(load, device)     # in every process but the first, until that one ends
    model = load_shard(load, group)            # in all of them

The first process answers requests and schedules; the others only run its steps (engine/parallel_runner.py).
"""

import signal
from collections.abc import Callable

from clearhead.api import Model, RecurrentBaseline
from clearhead.engine import LostProcessError, default_memory, follow_steps
from clearhead.errors import ClearheadError
from clearhead.parallel import ProcessGroup, divide_network


def load_shard(load: Callable[[], Model], group: ProcessGroup) -> Model:
    """Load a model in all processes and keep this one's part of it. If that fails in one, all raise its error."""
    models: list[Model] = []

    def load_part() -> None:
        model = load()
        if isinstance(model, RecurrentBaseline):
            raise ClearheadError("a recurrent network cannot be served; clearhead generate runs it")
        divide_network(model.network, group)
        models.append(model)

    group.run_everywhere(load_part)
    return models[0]


def common_memory(group: ProcessGroup, memory: int | None) -> int:
    """Return the bytes of keys and values that every process has room for.

    Processes on CPUs are taken to share one machine, so that each gets a part of what is free there.
    """
    free = min(group.run_everywhere(lambda: default_memory(group.device)))
    return memory or (free if group.device.type == "cuda" else free // group.launch.size)


def run_follower(load: Callable[[], Model], device: str | None) -> int:
    """Run the steps that the first process sends, until it ends. Return the exit code.

    Signals are left to the first process, which lets requests finish and then ends the others. An error that all
    processes have is reported by the first one only. Raise LostProcessError if that has ended.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with ProcessGroup.start(device) as group:
        try:
            model = load_shard(load, group)
            common_memory(group, None)
        except LostProcessError:
            raise
        except ClearheadError:
            return 1
        follow_steps(model.network, group)
    return 0
