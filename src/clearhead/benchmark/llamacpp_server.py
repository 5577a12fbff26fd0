"""llama.cpp's server under load: `llama-server` as a process of its own, asked over HTTP.

    engine = LlamaServer(target, "int4"); engine.open(concurrency=8, capacity=128)

It is found in the environment variable CLEARHEAD_LLAMA_SERVER or on the PATH. It reads the blocks of the .gguf file, or
those that it is quantized to by the `llama-quantize` beside it. The server has one slot for each client, and keeps its
other defaults: continuous batching, prompt caching, the batch sizes.
"""

import http.client
import os
import selectors
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clearhead.benchmark.llamacpp import BLOCK_TYPES, quantized_file
from clearhead.benchmark.serving_engine import ServingEngine
from clearhead.benchmark.streamed_request import StreamedRequest
from clearhead.benchmark.target import BenchmarkTarget
from clearhead.errors import ClearheadError

_VARIABLE = "CLEARHEAD_LLAMA_SERVER"
_SLOT_MULTIPLE = 256  # llama.cpp rounds the length of a slot up to such a multiple
_START_SECONDS = 600.0  # large models take minutes to load from a slow disk
_ALL_LAYERS = "999"
_OUR_SETTINGS = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT")  # clearhead sets them for its own threads


@dataclass(eq=False)
class _Answer:
    """A request that the server is answering."""

    number: int
    stream: StreamedRequest
    num_tokens: int = 0  # that have arrived


class LlamaServer(ServingEngine):
    """A process of llama-server."""

    name = "llama.cpp"

    def __init__(self, target: BenchmarkTarget, weights: str):
        self.target, self.weights = target, weights
        self.program = _find_server()
        source = target.gguf_file()
        self.file = source if weights == "stored" else _quantize(self.program, source, BLOCK_TYPES[weights])
        self.process: subprocess.Popen[bytes] | None = None
        self.log = target.folder / f"llama-server-{weights}.log"
        self.port = 0
        self.selector = selectors.DefaultSelector()
        self.answers: set[_Answer] = set()  # that are not complete yet

    def open(self, concurrency: int, capacity: int) -> None:
        self.close()
        slot_length = -(-(capacity + 2) // _SLOT_MULTIPLE) * _SLOT_MULTIPLE  # it stops one token before the end
        self.port = _free_port()
        threads = str(self.target.num_threads)
        command = [
            *(str(self.program), "--model", str(self.file), "--host", "127.0.0.1", "--port", str(self.port)),
            *("--parallel", str(concurrency), "--ctx-size", str(concurrency * slot_length)),
            *("--threads", threads, "--threads-batch", threads),
            *("--n-gpu-layers", _ALL_LAYERS if self.target.device.type == "cuda" else "0"),
        ]
        environment = {name: value for name, value in os.environ.items() if name not in _OUR_SETTINGS}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def send(self, number: int, prompt: Sequence[int], num_tokens: int) -> None:
        body = {
            "prompt": list(prompt),
            "n_predict": num_tokens,
            "stream": True,
            "cache_prompt": True,
            "ignore_eos": True,
            "samplers": ["top_k"],  # greedy: the other samplers would only cost it time
            "top_k": 1,
        }
        answer = _Answer(number, StreamedRequest(self.port, "/completion", body))
        self.answers.add(answer)
        self.selector.register(answer.stream.socket, selectors.EVENT_READ, answer)

    def wait(self) -> list[tuple[int, int]]:
        arrived = []
        for key, _ in self.selector.select(timeout=1):
            answer: _Answer = key.data
            num_before = answer.num_tokens
            for event in answer.stream.read():
                # A token that ends within a character is sent with the next one.
                answer.num_tokens = event.get("tokens_predicted", 0)
            if answer.stream.is_closed:
                self._forget(answer)
            if answer.num_tokens > num_before:
                arrived.append((answer.number, answer.num_tokens - num_before))
        self._check_running()
        return arrived

    def close(self) -> None:
        for answer in list(self.answers):
            self._forget(answer)
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _forget(self, answer: "_Answer") -> None:
        self.selector.unregister(answer.stream.socket)
        answer.stream.close()
        self.answers.remove(answer)

    def _wait_until_ready(self) -> None:
        """Return when the model is loaded. Raise ClearheadError if the server ends or takes too long."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            self._check_running()
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == http.client.OK:
                    return
            except OSError:  # it does not listen yet
                pass
            finally:
                connection.close()
            time.sleep(0.05)
        raise ClearheadError(f"llama-server was not ready after {_START_SECONDS:.0f} seconds")

    def _check_running(self) -> None:
        assert self.process is not None
        if self.process.poll() is not None:
            lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
            reason = next((line.strip() for line in reversed(lines) if "error" in line.lower()), "it gave no reason")
            raise ClearheadError(f"llama-server ended with code {self.process.returncode}: {reason}")


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
    raise ClearheadError(f"there is no llama-server; install llama.cpp or set {_VARIABLE} to the path of its server")


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
            raise ClearheadError(f"llama-quantize cannot quantize {source.name} to {block_type}")

    return quantized_file(source, block_type, f"program {Path(program).stat().st_mtime_ns}", run)


def _free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
