"""Measure the server under many streams: tokens per second over HTTP, beside the engine alone, and where the time goes.

    python benchmarks/http_throughput.py --out http.json --seconds 90       LLaMA-3.2-1B on an NVIDIA GPU, 256 streams
    python benchmarks/http_throughput.py smollm2-135m --device cpu --streams 32 --new-tokens 64 --clients 1

The weights are random, since the speed does not depend on them, and every token id has a made-up word as its text. The
engine and the server are processes of their own, which take turns with the same prompts of 16 to 256 token ids; a ratio
is that of one turn of each. The clients are processes that send all requests at once; the last event of a stream says
how many tokens it had, since the server may send several in one event. A round ends with the last byte of the last
stream; the first round, in which kernels are compiled, is not reported. With `--seconds`, rounds are left out so that
the measurement ends in time.

Two tables say where the time of the server goes: the processor time of its threads for each token, and what its event
loop does, as samples show that a timer takes in one more round.
"""

import argparse
import itertools
import json
import multiprocessing
import random
import re
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
    "the HTTP protocol": ("/h11/", "/uvicorn/", "server/protocol.py", "/starlette/"),
    "events and tasks": ("/asyncio/", "server/events.py", "server/job.py", "server/streaming.py"),
}
_READ_BYTES = 1 << 18
_EVENT = b"data: {"
_ENDING = re.compile(rb'"completion_tokens":(\d+).*data: \[DONE\]\n\n', re.DOTALL)
_ENDING_BYTES = 1024  # longer than the event with the numbers of tokens


def model_with_texts(arguments: argparse.Namespace) -> Model:
    """Return a random model with a byte-level tokenizer, as most models have one, of made-up words."""
    network = random_model(arguments.model, arguments.weights, arguments.device, arguments.layers).network
    if arguments.device == "cpu" and not accelerate(network):
        sys.exit(f"the kernels of the CPU do not run {arguments.model} in {arguments.weights}")
    words = {f"Ġ{number:x}": number for number in range(network.config.vocab_size)}  # Ġ stands for a space
    return Model(network, LibraryTokenizer(byte_level_bpe(words, merges=[], patterns=[]), SpecialTokens()))


def make_prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Return ragged prompts."""
    rng = random.Random(0)
    return [[rng.randrange(vocab_size - 1) for _ in range(rng.randint(16, _LONGEST_PROMPT))] for _ in range(count)]


def is_continued(commands: Connection) -> bool:
    """Return the next command; False if the measurement has ended early."""
    try:
        return bool(commands.recv())
    except EOFError:
        return False


# --- the engine alone


def run_engine(arguments: argparse.Namespace, commands: Connection) -> None:
    """Send the size of the vocabulary, and for each command the tokens per second of a round."""
    model = model_with_texts(arguments)
    prompts = make_prompts(arguments.streams, model.config.vocab_size)
    options = SamplingOptions(max_new_tokens=arguments.new_tokens, temperature=0)
    engine = model.engine(memory=memory_of(arguments), max_sequences=arguments.streams)
    commands.send(model.config.vocab_size)
    while is_continued(commands):
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


def serve(arguments: argparse.Namespace, port: int, commands: Connection) -> None:
    """Serve the model until a signal."""
    settings = ServerSettings(
        port=port,
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
    """Return the processor seconds of the event loop, of the engine's thread and of the other ones."""
    found = {"event loop": 0.0, "engine": 0.0, "requests": 0.0}
    for thread in threading.enumerate():
        name = next((name for start, name in _THREADS.items() if thread.name.startswith(start)), None)
        if name is not None and thread.ident is not None:
            found[name] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return found | {"kernels and the rest": time.process_time() - sum(found.values())}


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


def run_client(port: int, prompts: list[list[int]], num_new: int, commands: Connection) -> None:
    """For each command, ask for all prompts at once, and send back what arrived."""
    for number in itertools.count():
        if not is_continued(commands):
            return
        requests = [request(prompt, num_new, str(number)) for prompt in prompts]
        commands.send(ask_for_all(port, requests))


def ask_for_all(port: int, requests: list[bytes]) -> tuple[float, int, list[float]]:
    """Return when the last byte arrived, how many tokens there were, and the seconds to each first event."""
    selector, started, firsts, num_tokens, num_done = selectors.DefaultSelector(), {}, {}, 0, 0
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
            if connection not in firsts and _EVENT in received:
                firsts[connection] = time.perf_counter() - started[connection]
            rest[0] = received[-_ENDING_BYTES:]
            if not data:
                if found := _ENDING.search(received):
                    num_tokens, num_done = num_tokens + int(found[1]), num_done + 1
                selector.unregister(connection)
                connection.close()
    if num_done < len(requests):
        sys.exit(f"{len(requests) - num_done} streams were not complete")
    return time.perf_counter(), num_tokens, list(firsts.values())


def request(prompt: list[int], num_new: int, salt: str) -> bytes:
    """Return a request for a stream. Prompts with another salt share no cached prefixes."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": num_new, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
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


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Let the engine and the server take turns, and return all results."""
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:5.1f} s: {text}", flush=True)

    with socket.socket() as free:
        free.bind((_HOST, 0))
        port = free.getsockname()[1]
    _, engine = start(run_engine, arguments)
    server, control = start(serve, arguments, port)
    try:
        wait_until_ready(port, server)
        say("the server is ready")
        try:
            vocab_size = engine.recv()
        except EOFError:
            sys.exit("the engine did not start")
        say("the engine is ready")
        prompts, num_clients = make_prompts(arguments.streams, vocab_size), arguments.clients
        clients = [
            start(run_client, port, prompts[number::num_clients], arguments.new_tokens)[1]
            for number in range(num_clients)
        ]
        found: dict[str, Any] = {"engine_tokens_per_second": [], "http": []}
        for number in range(arguments.rounds + 1):
            round_began = time.monotonic()
            engine.send(True)
            rate = engine.recv()
            over_http = measure_round(control, clients, arguments)
            warmup = "" if number else " (not counted: kernels are compiled)"
            say(f"engine {rate:,.0f} tokens/s, HTTP {over_http['tokens_per_second']:,.0f}{warmup}")
            if number:
                found["engine_tokens_per_second"].append(rate)
                found["http"].append(over_http)
            left = arguments.seconds - (time.monotonic() - began)
            if number and left < 2 * (time.monotonic() - round_began) + _END_SECONDS:
                break
        control.send("sample")
        measure_round(control, clients, arguments)
        control.send("stop")
        found["event_loop"] = control.recv()
        for each in (engine, *clients):
            each.send(False)
        return found
    finally:
        server.terminate()
        server.join(_END_SECONDS)
        server.kill()


def measure_round(control: Connection, clients: list[Connection], arguments: argparse.Namespace) -> dict[str, Any]:
    """Let all clients ask at once."""
    control.send("threads")
    before, began = control.recv(), time.perf_counter()
    for each in clients:
        each.send(True)
    ends, counts, firsts = zip(*[each.recv() for each in clients], strict=True)
    control.send("threads")
    after = control.recv()
    seconds, num_tokens = max(ends) - began, sum(counts)
    if num_tokens != arguments.streams * arguments.new_tokens:
        sys.exit(f"{num_tokens} tokens arrived, {arguments.streams * arguments.new_tokens} were asked for")
    waits = sorted(wait for part in firsts for wait in part)
    return {
        "tokens_per_second": num_tokens / seconds,
        "seconds": seconds,
        "first_token_p50_seconds": waits[len(waits) // 2],
        "first_token_p99_seconds": waits[len(waits) * 99 // 100],
        "processor_us_per_token": {name: (after[name] - before[name]) / num_tokens * 1e6 for name in after},
    }


def print_tables(found: dict[str, Any]) -> None:
    """Print the ratio, and the tables of where the time goes."""
    rounds, engine = found["http"], found["engine_tokens_per_second"]
    rates = [each["tokens_per_second"] for each in rounds]
    ratios = [rate / alone for rate, alone in zip(rates, engine, strict=True)]
    middle = statistics.median
    print(f"engine {middle(engine):,.0f} tokens/s; HTTP {middle(rates):,.0f} tokens/s")
    print(f"HTTP / engine: {middle(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    for name in ("first_token_p50_seconds", "first_token_p99_seconds"):
        print(f"{name}: {middle(each[name] for each in rounds):.3f}")
    elapsed = middle(each["seconds"] / each["tokens_per_second"] / each["seconds"] for each in rounds) * 1e6
    print(f"\n| thread | processor time, µs per token ({elapsed:.1f} µs elapse) |\n|---|---|")
    for name in rounds[0]["processor_us_per_token"]:
        print(f"| {name} | {middle(each['processor_us_per_token'][name] for each in rounds):.1f} |")
    total = sum(found["event_loop"].values())
    print(f"\n| what the event loop does | share of {total} samples |\n|---|---|")
    for name, count in Counter(found["event_loop"]).most_common():
        print(f"| {name} | {100 * count / total:.0f} % |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="llama-3.2-1b")
    parser.add_argument("--weights", choices=("bfloat16", "int8", "int4"), default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, help="keep only so many, so that the server takes most of the time")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--clients", type=int, default=4, help="number of client processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3600, help="end by itself after this time at the latest")
    parser.add_argument("--out", type=Path, help="file for the results")
    arguments = parser.parse_args()
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        sys.exit(f"{' and '.join(missing)} must be installed for this measurement: pip install 'clearhead[serve]'")
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, lambda *_: sys.exit("ended by a signal"))  # which ends the other processes
    signal.alarm(arguments.seconds)
    found = measure(arguments)
    print_tables(found)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
