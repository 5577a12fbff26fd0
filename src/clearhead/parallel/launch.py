"""What torchrun says about this process, in environment variables. Without torch.

current_launch().size    # 1 unless torchrun has started several processes
"""

import os
from dataclasses import dataclass

_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))  # with the values of a single process


@dataclass(frozen=True)
class Launch:
    """The rank of this process among `size` processes; local_rank: its rank on this machine."""

    rank: int
    size: int
    local_rank: int

    @property
    def is_main(self) -> bool:
        """Whether this is the first process, which prints and writes shared files."""
        return self.rank == 0


def current_launch() -> Launch:
    """Return how torchrun has started this process, or that it is the only one."""
    rank, size, local_rank = (int(os.environ.get(name, default)) for name, default in _VARIABLES)
    return Launch(rank, size, local_rank)
