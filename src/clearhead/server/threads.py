"""Run a function in a thread that ends with it.

    vectors = run_apart(embed, service, text)

OpenMP keeps helper threads for every thread that has used it. If there are more of them than cores, its threads sleep
at barriers instead of spinning, and a step of the engine with 32 sequences takes 25 ms instead of 20 on two cores. The
helpers of a thread end with it.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def run_apart(function: Callable[..., T], *arguments: object) -> T:
    """Return the result of a function that runs in a new thread, and wait for the end of that thread."""
    with ThreadPoolExecutor(1, thread_name_prefix="clearhead-apart") as threads:
        return threads.submit(function, *arguments).result()
