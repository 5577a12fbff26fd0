"""Measure the server under many streams: tokens per second over HTTP, beside the engine alone, and where the time goes.

    python benchmarks/http_throughput.py --out http.json --seconds 90       LLaMA-3.2-1B on an NVIDIA GPU, 256 streams
    python benchmarks/http_throughput.py --http-processes 0 2 4 --seconds 150           servers with and without them
    python benchmarks/http_throughput.py smollm2-135m --device cpu --streams 32 --new-tokens 64 --clients 1
    python benchmarks/http_throughput.py smollm2-135m --device cpu --layers 1 --idle 1 1.5   an engine that does nothing

The weights are random, since the speed does not depend on them, and every token id has a made-up word as its text. The
engine and each server are processes of their own and take turns with the same prompts of 16 to 256 token ids; a ratio
is that of one turn of each. The clients are processes that send all requests at once and count the events that arrive:
each token must come as an event of its own. A round ends with the last byte of the last stream; the first round, in
which kernels are compiled, is not reported. With `--seconds`, rounds are left out so that the measurement ends in time.

Two tables say where the time of a server goes: the processor time of its threads and of its HTTP processes for each
token, and what its event loop does, as samples show that a timer takes in one more round.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import random
import selectors
import signal
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from engine_throughput import preset_with_layers, random_model
from idle_engine import IdleModel

from clearhead import Model
from clearhead.backends import accelerate
from clearhead.engine import Request, bytes_per_token
from clearhead.options import SamplingOptions
from clearhead.server import ServerSettings, run_server
from clearhead.tokenization.byte_level import byte_level_bpe
from clearhead.tokenization.library_tokenizer import LibraryTokenizer, SpecialTokens

_NEEDED = ("starlette", "uvicorn", "prometheus_client")
_HOST = "127.0.0.1"
_START_SECONDS = 300
_END_SECONDS = 5  # in which all processes end
_SAMPLE_SECONDS = 0.005
_LONGEST_PROMPT = 256
_SPARE_TOKENS = 64  # of each stream: its last page is partly empty, and another one is kept free
_THREADS = {"MainThread": "event loop", "clearhead-engine": "engine", "clearhead-prepare": "requests"}
_ACTIVITIES = {
    "waiting for events": ("/selectors.py",),
    "JSON": ("server/json_text.py", "/json/", "server/completions.py"),
    "the text of a token": ("server/choice.py", "/generation/", "/tokenization/"),
    "measurements": ("/prometheus_client/", "server/metrics.py"),
    "frames for the HTTP processes": ("server/frames.py", "server/http_processes.py"),
    "the HTTP protocol": ("/h11/", "/uvicorn/", "server/protocol.py", "/starlette/"),
    "events and tasks": ("/asyncio/", "server/events.py", "server/job.py", "server/streaming.py"),
}
_READ_BYTES = 1 << 18
_EVENT, _DONE = b"data: {", b"data: [DONE]\n\n"


def model_with_texts(arguments: argparse.Namespace) -> Model:
    """Return a random model with a byte-level tokenizer, as most models have one, of made-up words."""
    network = random_model(arguments.model, arguments.weights, arguments.device, arguments.layers).network
    words = {f"Ġ{number:x}": number for number in range(network.config.vocab_size)}  # Ġ stands for a space
    tokenizer = LibraryTokenizer(byte_level_bpe(words, merges=[], patterns=[]), SpecialTokens())
    if arguments.idle is not None:
        locked, waiting = (milliseconds / 1000 for milliseconds in arguments.idle)
        return IdleModel(network, tokenizer, locked_seconds=locked, waiting_seconds=waiting)
    if arguments.device == "cpu" and not accelerate(network):
        sys.exit(f"the kernels of the CPU do not run {arguments.model} in {arguments.weights}")
    return Model(network, tokenizer)


def make_prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Return ragged prompts."""
    rng = random.Random(0)
    return [[rng.randrange(vocab_size - 1) for _ in range(rng.randint(16, _LONGEST_PROMPT))] for _ in range(count)]


def next_command(commands: Connection) -> int:
    """Return the next command; 0 if the measurement has ended early."""
    try:
        return int(commands.recv())
    except EOFError:
        return 0


# --- the engine alone


def run_engine(arguments: argparse.Namespace, commands: Connection) -> None:
    """Send the size of the vocabulary, and for each command the tokens per second of a round."""
    model = model_with_texts(arguments)
    prompts = make_prompts(arguments.streams, model.config.vocab_size)
    options = SamplingOptions(max_new_tokens=arguments.new_tokens, temperature=0)
    engine = model.engine(memory=memory_of(arguments), max_sequences=arguments.streams)
    commands.send(model.config.vocab_size)
    while next_command(commands):
        engine.forget_prefixes()
        start = time.perf_counter()
        requests = [Request(prompt=each, options=options) for each in prompts]
        num_tokens = sum(event.token is not None for event in engine.run(requests))
        commands.send(num_tokens / (time.perf_counter() - start))


def memory_of(arguments: argparse.Namespace) -> int:
    """Return the bytes of the keys and values of all streams."""
    num_tokens = _LONGEST_PROMPT + arguments.new_tokens + _SPARE_TOKENS
    stack = preset_with_layers(arguments.model, arguments.layers).output_stack
    return arguments.streams * num_tokens * bytes_per_token(stack, torch.bfloat16)


# --- the server


def serve(arguments: argparse.Namespace, port: int, http_processes: int, commands: Connection) -> None:
    """Serve the model until a signal."""
    settings = ServerSettings(
        port=port,
        http_processes=http_processes,
        max_concurrent=arguments.streams,
        max_queued_tokens=arguments.streams * (_LONGEST_PROMPT + _SPARE_TOKENS),
        memory=memory_of(arguments),
    )
    threading.Thread(target=report, args=(commands, sample_event_loop()), daemon=True).start()
    run_server(lambda: model_with_texts(arguments), "random", settings, print)


def report(commands: Connection, samples: "Counter[str]") -> None:
    """Send the processor seconds of each thread and the samples for each command."""
    while True:
        try:
            command = commands.recv()
        except EOFError:
            return
        if command == "sample":
            samples.clear()
            signal.setitimer(signal.ITIMER_REAL, _SAMPLE_SECONDS, _SAMPLE_SECONDS)
        elif command == "stop":
            signal.setitimer(signal.ITIMER_REAL, 0)
            commands.send(dict(samples))
        else:
            commands.send(processor_seconds())


def processor_seconds() -> dict[str, float]:
    """Return the processor seconds of the event loop, of the engine's thread, of the others and of HTTP processes."""
    found = {"event loop": 0.0, "engine": 0.0, "requests": 0.0}
    for thread in threading.enumerate():
        name = next((name for start, name in _THREADS.items() if thread.name.startswith(start)), None)
        if name is not None and thread.ident is not None:
            found[name] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    found["kernels and the rest"] = time.process_time() - sum(found.values())
    return found | {"HTTP processes": sum(seconds_of_children())}


def seconds_of_children() -> list[float]:
    """Return the processor seconds of each process that this one has started, in ticks of 10 ms."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()  # the name before may have spaces
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[1]) == os.getpid():
            found.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return found


def sample_event_loop() -> "Counter[str]":
    """Let SIGALRM count what the main thread does, which is the event loop."""
    samples: Counter[str] = Counter()

    def on_signal(_number: int, frame: FrameType | None) -> None:
        samples[activity(frame)] += 1

    signal.signal(signal.SIGALRM, on_signal)
    return samples


def activity(frame: FrameType | None) -> str:
    """Return what a stack does, by the innermost of its files that the table knows."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith("selector_events.py") and frame.f_code.co_name in ("write", "send", "_write_send"):
            return "sending, and waiting for the interpreter's lock after it"
        for name, parts in _ACTIVITIES.items():
            if any(part in file for part in parts):
                return name
        frame = frame.f_back
    return "the rest"


def wait_until_ready(port: int, process: multiprocessing.Process) -> None:
    """Return when /health answers 200."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.is_alive():
        try:
            with socket.create_connection((_HOST, port), timeout=5) as connection:
                connection.sendall(f"GET /health HTTP/1.1\r\nHost: {_HOST}\r\nConnection: close\r\n\r\n".encode())
                if b" 200 " in connection.recv(4096):
                    return
        except OSError:
            pass
        time.sleep(0.2)
    sys.exit("the server did not start")


# --- the clients


def run_client(prompts: list[list[int]], num_new: int, commands: Connection) -> None:
    """For each command, which is a port, ask for all prompts at once, and send back what arrived."""
    for number in itertools.count():
        if not (port := next_command(commands)):
            return
        requests = [request(prompt, num_new, str(number)) for prompt in prompts]
        commands.send(ask_for_all(port, requests))


def ask_for_all(port: int, requests: list[bytes]) -> tuple[float, int, list[float]]:
    """Return when the last byte arrived, how many events there were, and the seconds to each first one."""
    selector, started, firsts, num_events, is_done = selectors.DefaultSelector(), {}, {}, 0, set()
    for content in requests:
        connection = socket.create_connection((_HOST, port))
        connection.sendall(content)
        connection.setblocking(False)
        started[connection] = time.perf_counter()
        selector.register(connection, selectors.EVENT_READ, [b""])
    while selector.get_map():
        for key, _ in selector.select():
            connection, rest = key.fileobj, key.data
            data = connection.recv(_READ_BYTES)
            received = rest[0] + data
            if count := received.count(_EVENT):
                firsts.setdefault(connection, time.perf_counter() - started[connection])
                num_events += count
            if _DONE in received:
                is_done.add(connection)
            rest[0] = received[-len(_EVENT) + 1 :]  # an event may begin in it
            if not data:
                selector.unregister(connection)
                connection.close()
    if len(is_done) < len(requests):
        sys.exit(f"{len(requests) - len(is_done)} streams were not complete")
    return time.perf_counter(), num_events, list(firsts.values())


def request(prompt: list[int], num_new: int, salt: str) -> bytes:
    """Return a request for a stream. Prompts with another salt share no cached prefixes."""
    body = {"prompt": prompt, "max_tokens": num_new, "temperature": 0, "ignore_eos": True, "stream": True}
    content = json.dumps({**body, "cache_salt": salt}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {_HOST}\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


# --- the measurement


def start(target: Callable[..., None], *arguments: object) -> tuple[multiprocessing.Process, Connection]:
    """Start a process with one end of a pipe, and return it with the other end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


class Server:
    """A server in a process of its own, and its results."""

    def __init__(self, arguments: argparse.Namespace, http_processes: int):
        with socket.socket() as free:
            free.bind((_HOST, 0))
            self.port = free.getsockname()[1]
        self.process, self.control = start(serve, arguments, self.port, http_processes)
        self.name = f"{http_processes} HTTP processes" if http_processes else "HTTP in one process"
        self.results: dict[str, Any] = {"name": self.name, "rounds": [], "event_loop": Counter()}


def measure(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """Let the engine and the servers take turns, and add all results as they come."""
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:5.1f} s: {text}", flush=True)

    _, engine = start(run_engine, arguments)
    servers = [Server(arguments, count) for count in arguments.http_processes]
    rates: list[float] = []
    results |= {"engine_tokens_per_second": rates, "servers": [each.results for each in servers]}
    try:
        for each in servers:
            wait_until_ready(each.port, each.process)
        say("the servers are ready")
        try:
            vocab_size = engine.recv()
        except EOFError:
            sys.exit("the engine did not start")
        say("the engine is ready")
        prompts, num_clients = make_prompts(arguments.streams, vocab_size), arguments.clients
        clients = [start(run_client, prompts[i::num_clients], arguments.new_tokens)[1] for i in range(num_clients)]
        for number in range(arguments.rounds + 1):
            round_began = time.monotonic()
            engine.send(True)
            rate = engine.recv()
            found = [measure_round(each, clients, arguments) for each in servers]
            shown = [f"{each.name} {one['tokens_per_second']:,.0f}" for each, one in zip(servers, found, strict=True)]
            warmup = "" if number else " (not counted: kernels are compiled)"
            say(f"tokens/s: engine {rate:,.0f}, {', '.join(shown)}{warmup}")
            if number:
                rates.append(rate)
                for each, one in zip(servers, found, strict=True):
                    each.results["rounds"].append(one)
            left = arguments.seconds - (time.monotonic() - began)
            if number and left < 2 * (time.monotonic() - round_began) + _END_SECONDS:
                break
        for each in servers:
            each.control.send("sample")
            measure_round(each, clients, arguments)
            each.control.send("stop")
            each.results["event_loop"] |= each.control.recv()
        for connection in (engine, *clients):
            connection.send(False)
    finally:
        for each in servers:
            each.process.terminate()
        for each in servers:
            each.process.join(_END_SECONDS)
            each.process.kill()


def measure_round(server: Server, clients: list[Connection], arguments: argparse.Namespace) -> dict[str, Any]:
    """Let all clients ask a server at once."""
    server.control.send("threads")
    before, began = server.control.recv(), time.perf_counter()
    for each in clients:
        each.send(server.port)
    ends, counts, firsts = zip(*[each.recv() for each in clients], strict=True)
    server.control.send("threads")
    after = server.control.recv()
    seconds, num_tokens = max(ends) - began, arguments.streams * arguments.new_tokens
    waits = sorted(wait for part in firsts for wait in part)
    return {
        "tokens_per_second": num_tokens / seconds,
        "seconds": seconds,
        "events_per_token": sum(counts) / num_tokens,
        "first_token_p50_seconds": waits[len(waits) // 2],
        "first_token_p99_seconds": waits[len(waits) * 99 // 100],
        "processor_us_per_token": {name: (after[name] - before[name]) / num_tokens * 1e6 for name in after},
    }


def print_tables(found: dict[str, Any]) -> None:
    """Print rates and ratios, and the tables of where the time goes."""
    middle, engine, servers = statistics.median, found["engine_tokens_per_second"], found["servers"]
    rates = [[each["tokens_per_second"] for each in server["rounds"]] for server in servers]
    print(f"engine {middle(engine):,.0f} tokens/s ({min(engine):,.0f} to {max(engine):,.0f})")
    for server, measured in zip(servers, rates, strict=True):
        ratios = [rate / alone for rate, alone in zip(measured, engine, strict=True)]
        print(f"\n{server['name']}: {middle(measured):,.0f} tokens/s ({min(measured):,.0f} to {max(measured):,.0f})")
        print(f"HTTP / engine: {middle(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        for name in ("events_per_token", "first_token_p50_seconds", "first_token_p99_seconds"):
            values = [each[name] for each in server["rounds"]]
            print(f"{name}: {middle(values):.3f} ({min(values):.3f} to {max(values):.3f})")
    names = " | ".join(server["name"] for server in servers)
    line = f"|---{'|---' * len(servers)}|"
    print(f"\n| processor time, µs per token | {names} |\n{line}")
    for name in servers[0]["rounds"][0]["processor_us_per_token"]:
        values = [middle(each["processor_us_per_token"][name] for each in server["rounds"]) for server in servers]
        print(f"| {name} | {' | '.join(f'{value:.1f}' for value in values)} |")
    print(f"| elapsed | {' | '.join(f'{1e6 / middle(measured):.1f}' for measured in rates)} |")
    print(f"\n| samples of the event loop | {names} |\n{line}")
    activities = sum((server["event_loop"] for server in servers), Counter[str]())
    for name, _ in activities.most_common():
        shares = [server["event_loop"].get(name, 0) / max(server["event_loop"].total(), 1) for server in servers]
        print(f"| {name} | {' | '.join(f'{share:.0%}' for share in shares)} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="llama-3.2-1b")
    parser.add_argument("--weights", choices=("bfloat16", "int8", "int4"), default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, help="keep only so many, so that the server takes most of the time")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--clients", type=int, default=4, help="number of client processes")
    parser.add_argument(
        "--http-processes", type=int, nargs="+", default=[0], help="measure a server with so many, for each number"
    )
    parser.add_argument(
        "--idle",
        type=float,
        nargs=2,
        metavar=("LOCKED", "WAITING"),
        help="compute nothing: a step takes so many ms with the interpreter's lock and without it",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3600, help="end by itself after this time at the latest")
    parser.add_argument("--out", type=Path, help="file for the results")
    arguments = parser.parse_args()
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        sys.exit(f"{' and '.join(missing)} must be installed for this measurement: pip install 'clearhead[serve]'")
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, lambda *_: sys.exit("ended by a signal"))  # which ends the other processes
    signal.alarm(arguments.seconds)
    results: dict[str, Any] = {}
    try:
        measure(arguments, results)
    finally:  # also if the time is over
        if results.get("engine_tokens_per_second"):
            print_tables(results)
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
