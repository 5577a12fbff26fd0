"""Configure the heap for training on a CPU.

reuse_freed_memory()
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from <malloc.h>
_RETAINED_BYTES = 1 << 30


def reuse_freed_memory() -> None:
    """Let malloc keep the memory that a backward pass frees for the next forward pass.

    By default glibc returns large blocks and the end of the heap to the system each time. Faulting the pages in again
    took an eighth of the compiled step of a small model.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # musl does not have it
        mallopt(_M_MMAP_THRESHOLD, _RETAINED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _RETAINED_BYTES)
