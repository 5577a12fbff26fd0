"""One network in several processes: tensor parallelism for training and serving.

    with ProcessGroup.start("auto") as group: divide_network(network, group)

launch         what torchrun says about this process; no torch
collectives    sums and texts of all processes
shards         keep this process's heads and feed-forward columns of a network
process_group  the processes of a server, and the messages that the first one sends to the others

Names are imported on first use, so that commands can ask for the rank before torch is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clearhead.parallel.collectives import all_reduce, gather_texts
    from clearhead.parallel.launch import Launch, current_launch
    from clearhead.parallel.process_group import ProcessGroup, divide_network
    from clearhead.parallel.shards import TensorParallelRank, is_divided, shard_network

_MODULES = {  # the module that defines each name
    "Launch": "launch",
    "ProcessGroup": "process_group",
    "TensorParallelRank": "shards",
    "all_reduce": "collectives",
    "current_launch": "launch",
    "divide_network": "process_group",
    "gather_texts": "collectives",
    "is_divided": "shards",
    "shard_network": "shards",
}

__all__ = [
    "Launch",
    "ProcessGroup",
    "TensorParallelRank",
    "all_reduce",
    "current_launch",
    "divide_network",
    "gather_texts",
    "is_divided",
    "shard_network",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'clearhead.parallel' has no attribute {name!r}")
    return getattr(import_module(f"clearhead.parallel.{_MODULES[name]}"), name)
