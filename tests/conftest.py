"""Shared fixtures: real models fetched by name into the user's cache, and a seeded generator."""

import gc
import os
import sys
from pathlib import Path

if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported, which reads it

os.environ.setdefault("CLEARHEAD_COMPILE", "0")  # tests of models in temporary homes must not compile unasked

# Before torch is imported. Threads of OpenMP that wait spin for milliseconds by default and take the cores from other
# tests: thirteen tests with two threads took 40 s of processor time beside busy processes, and 1 s with this.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process that a test starts would compile the package anew

import pytest
import torch

from clearhead.backends.cpu_kernels import library as cpu
from clearhead.catalog import DownloadError, get
from clearhead.errors import ClearheadError


def pytest_configure() -> None:
    sys.dont_write_bytecode = False
    torch.set_num_threads(1)  # pytest-xdist starts one worker per core, so more threads would only compete


def pytest_collection_finish() -> None:
    """Let the garbage collector skip the modules and tests: 830,000 objects, half a second in each full search."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let Python end modules as usual: with frozen objects, Triton prints hundreds of lines about leaks."""
    gc.unfreeze()


def installed(name: str) -> Path:
    try:
        return get(name)
    except DownloadError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The file SmolLM2-135M-Instruct.Q4_1.gguf."""
    return installed("smollm2")


@pytest.fixture(scope="session")
def stories15m() -> Path:
    """The file stories15M.bin; tokenizer.bin is in the same folder."""
    return installed("stories15m")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, in Hugging Face form."""
    return installed("minilm")


@pytest.fixture(scope="session")
def opus_mt() -> Path:
    """The folder of OPUS-MT zh-en, in CTranslate2 form, with its vocabulary and sentencepiece.model."""
    return installed("opus-mt-zh-en")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def kernels() -> None:
    """The CPU kernels, compiled if necessary."""
    try:
        cpu.load_kernel_library(build=True)
    except ClearheadError as error:
        pytest.skip(str(error))
