"""Give freed memory back to the operating system.

    return_freed_memory()

glibc keeps most of the memory of freed tensors for later: after SmolLM2 was packed tensor by tensor, the process held
more than twice the memory of the packed weights.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def return_freed_memory() -> None:
    """Return the memory of freed tensors to the system, which takes milliseconds. Do nothing without glibc."""
    if trim := _malloc_trim():
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library, such as musl
        return None
    return trim
