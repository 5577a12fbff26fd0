"""The compiler of Triton accepts the products in all formats; the interpreter of the other tests accepts more."""

import os
import subprocess
import sys

import pytest


def test_the_products_compile_for_a_hopper_gpu():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.backends.cuda.compiled_products"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
