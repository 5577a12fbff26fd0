"""Servers under load: a process of its own that answers over HTTP with server-sent events.

    engine = LlamaServer(target, "int4"); engine.open(concurrency=8, capacity=128)    # a ServerProcess

A subclass gives the command, the body of a request, and how many tokens an event reports. One thread sends and receives
everything, in the same way for every server. It parses the answers when all have arrived, because it shares the
processor with the server.
"""

import http.client
import os
import selectors
import signal
import socket
import subprocess
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from clearhead.benchmark.serving_engine import ServingEngine
from clearhead.benchmark.streamed_request import Parts, StreamedRequest, is_closed_by_peer, parse_answer
from clearhead.benchmark.target import BenchmarkTarget
from clearhead.errors import ClearheadError

_START_SECONDS = 600.0  # large models take minutes to load from a slow disk
_GATHER_SECONDS = 0.0002  # how much later a token may count as arrived
_OUR_SETTINGS = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT")  # clearhead sets them for its own threads


@dataclass(eq=False)
class _Answer:
    """A request that the server is answering."""

    number: int
    body: dict[str, Any]
    stream: StreamedRequest


class ServerProcess(ServingEngine):
    """A server that the benchmark starts and ends."""

    program_name: ClassVar[str]  # in messages
    path: ClassVar[str]  # where requests are sent

    def __init__(self, target: BenchmarkTarget, weights: str):
        self.target, self.weights = target, weights
        self.process: subprocess.Popen[bytes] | None = None
        self.log = target.folder / f"{self.program_name.replace(' ', '-')}-{weights}.log"
        self.port = 0
        self.selector = selectors.DefaultSelector()
        self.idle: list[socket.socket] = []  # open connections without a request, which the next requests use
        self.answers: set[_Answer] = set()  # those that are not complete yet
        self.received: dict[int, Parts] = {}  # complete answers, by the number of the request

    @abstractmethod
    def command(self, concurrency: int, capacity: int) -> list[str]:
        """Return the command that starts the server on `self.port` of the loopback interface."""

    @abstractmethod
    def request_body(self, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
        """Return the body of a request for this many greedy tokens, as a stream."""

    @abstractmethod
    def num_tokens_in(self, event: Mapping[str, Any]) -> int | None:
        """Return how many tokens of an answer have been generated so far; None if the event does not say."""

    def open(self, concurrency: int, capacity: int) -> None:
        self.close()
        self.port = _free_port()
        command = self.command(concurrency, capacity)
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
        self._start(number, self.request_body(prompt, num_tokens), self._idle_connection())

    def wait(self) -> list[int]:
        finished = []
        ready = self.selector.select(timeout=1)
        if len(ready) < len(self.answers):  # others may follow at once, and each would wake this thread
            time.sleep(_GATHER_SECONDS)
            ready = self.selector.select(timeout=0)
        for key, _ in ready:
            answer: _Answer = key.data
            answer.stream.receive()
            if answer.stream.is_lost:
                self._forget(answer)
                answer.stream.close()
                self._start(answer.number, answer.body)
            elif answer.stream.is_complete:
                self._forget(answer)
                self.received[answer.number] = answer.stream.parts
                finished.append(answer.number)
                if answer.stream.is_kept:
                    self.idle.append(answer.stream.socket)
                else:
                    answer.stream.close()
        self._check_running()
        return finished

    def take_token_times(self) -> dict[int, list[float]]:
        received, self.received = self.received, {}
        return {number: self._token_times(parts) for number, parts in received.items()}

    def _token_times(self, parts: Parts) -> list[float]:
        """Return when each token arrived. A token that ends within a character is sent with the next one."""
        times: list[float] = []
        for arrived, event in parse_answer(parts):
            times += [arrived] * ((self.num_tokens_in(event) or 0) - len(times))
        return times

    def close(self) -> None:
        for answer in list(self.answers):
            self._forget(answer)
            answer.stream.close()
        while self.idle:
            self.idle.pop().close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _start(self, number: int, body: dict[str, Any], connection: socket.socket | None = None) -> None:
        assert self.process is not None
        try:
            answer = _Answer(number, body, StreamedRequest(self.port, self.path, body, connection))
        except ConnectionError as error:
            with suppress(subprocess.TimeoutExpired):  # a process closes its port before it has ended
                self.process.wait(timeout=5)
            self._check_running()
            raise ClearheadError(f"{self.program_name} does not accept a connection: {error}") from error
        self.answers.add(answer)
        self.selector.register(answer.stream.socket, selectors.EVENT_READ, answer)

    def _idle_connection(self) -> socket.socket | None:
        """Return an idle connection that is still open, or None. llama.cpp's server closes each after its stream."""
        while self.idle:
            connection = self.idle.pop()
            if not is_closed_by_peer(connection):
                return connection
            connection.close()
        return None

    def _forget(self, answer: "_Answer") -> None:
        self.selector.unregister(answer.stream.socket)
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
        raise ClearheadError(f"{self.program_name} was not ready after {_START_SECONDS:.0f} seconds")

    def _check_running(self) -> None:
        assert self.process is not None
        if self.process.poll() is not None:
            output = self.log.read_text(encoding="utf-8", errors="replace")
            raise ClearheadError(f"{self.program_name} {describe_end(self.process.returncode, output)}")


def describe_end(code: int, output: str) -> str:
    """Return how a program ended, by the name of a signal or an exit code, and its last line about an error."""
    end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    lines = [line.strip() for line in output.split("\n") if "error" in line.lower()]
    return f"{end}: {lines[-1] if lines else 'it gave no reason'}"


def _free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
