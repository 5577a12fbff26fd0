"""One network in several processes: tensor parallelism for training and serving.

    with ProcessGroup.start() as group: divide_network(network, group)

launch         what torchrun says about this process; no torch
collectives    join and leave the processes; sums, texts and results of all of them
shards         keep this process's heads and feed-forward columns of a network
process_group  the processes of a server, and the messages that the first one sends to the others

Names are imported on first use, so that commands can ask for the rank before torch is imported.
"""

from typing import TYPE_CHECKING

from clearhead.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from clearhead.parallel.collectives import all_reduce, gather_texts, join_group, leave_group, run_everywhere
    from clearhead.parallel.launch import Launch, current_launch
    from clearhead.parallel.process_group import ProcessGroup, divide_network
    from clearhead.parallel.shards import TensorParallelRank, is_divided, shard_network

__all__ = [
    "Launch",
    "ProcessGroup",
    "TensorParallelRank",
    "all_reduce",
    "current_launch",
    "divide_network",
    "gather_texts",
    "is_divided",
    "join_group",
    "leave_group",
    "run_everywhere",
    "shard_network",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "collectives": ["all_reduce", "gather_texts", "join_group", "leave_group", "run_everywhere"],
        "launch": ["Launch", "current_launch"],
        "process_group": ["ProcessGroup", "divide_network"],
        "shards": ["TensorParallelRank", "is_divided", "shard_network"],
    },
)
