"""The CPU kernels without AVX-512, compiled once for all tests, and kept with what pytest keeps between two runs."""

import ctypes

import pytest

from clearhead.backends.cpu_kernels import compiling, library


@pytest.fixture(scope="session")
def plain_library(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels with plain loops; later runs and the processes of pytest-xdist share a build of the same sources."""
    kept = getattr(pytestconfig, "cache", None)  # None with -p no:cacheprovider
    folder = kept.mkdir("plain_kernels") if kept else tmp_path_factory.mktemp("plain_kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "FLAGS", (*compiling.FLAGS, "-mno-avx512f"))
        path = folder / compiling.library_path.__wrapped__().name  # depends on sources, flags and processor
        if library.open_library(path) is None:
            compiling.build_library(path)
    opened = library.open_library(path)
    assert opened is not None
    return opened
