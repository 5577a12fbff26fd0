"""The CPU kernels without AVX-512, compiled once for all tests."""

import ctypes
import os

import pytest

from clearhead.backends.cpu_kernels import compiling, library


@pytest.fixture(scope="session")
def plain_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels with plain loops; the processes of pytest-xdist share one build."""
    folder = tmp_path_factory.getbasetemp()
    path = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "plain_kernels" / "plain.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "FLAGS", (*compiling.FLAGS, "-mno-avx512f"))
        if library.open_library(path) is None:
            compiling.build_library(path)
    opened = library.open_library(path)
    assert opened is not None
    return opened
