"""The memory of pages: reserved, but not occupied before it is written."""

import subprocess
import sys

import pytest
import torch

from clearhead.cache import PagePool, PageStorage
from clearhead.families import preset

MEMORY_OF_PAGES = """
import torch
from clearhead.cache import PagePool, PageStorage
from clearhead.families import preset

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

stack, before = preset("gpt2").output_stack, resident()
storage = PageStorage.for_stack(stack, PagePool(1000, 32), torch.bfloat16, torch.device("cpu"))
assert storage.allocated_bytes > 10**9
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_that_are_not_written_take_no_memory():
    result = subprocess.run([sys.executable, "-c", MEMORY_OF_PAGES], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 64 * 2**20


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_pages_are_zeros_of_the_dtype(dtype):
    storage = PageStorage.for_stack(preset("gpt2").output_stack, PagePool(2, 16), dtype, torch.device("cpu"))
    keys, values = storage.layers[0]
    assert keys.shape == values.shape == (2, 12, 16, 64)
    assert keys.dtype == dtype
    assert not keys.any()
    keys[1, 3] = 1  # pages can be written
    assert keys.sum() == 16 * 64
