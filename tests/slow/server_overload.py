"""Offer `clearhead serve` ten times what it can take, then a storm of cancels, then kill it.

    python -m tests.slow.server_overload smollm2 --seconds 120

Under overload, every request must be answered with 200 or 429, tokens must be generated at 0.9 of the peak rate,
accepted requests must get their first token in the time that the places and the queue take, and memory must not grow.
After 200 requests whose clients go away, the next one must be answered within 5 seconds. A killed server must start
again on its port and give the same text. Server and clients are different processes, but they share the processor.
"""

import argparse
import heapq
import http.client
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from urllib.parse import urlsplit

from clearhead.benchmark.streamed_request import StreamedRequest, is_closed_by_peer, parse_answer

BODY = {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0, "ignore_eos": True, "stream": True}
HEADERS = {"Content-Type": "application/json"}
NUM_CANCELS = 200
CLIENT_SECONDS = 120
GATHER_SECONDS = 0.0002  # how much later an answer may count as arrived: each one would wake the clients


def run_overload(url, seconds, max_concurrent, factor, pid=None):
    """Return the answers by status, rates of tokens and times to the first token.

    The rate of `max_concurrent` clients, each of which sends one request after another, is measured before and after
    the overload; the higher of the two is the peak. Under overload there are `factor` times as many clients, and some
    more for those in the queue, and each sends a request in the time that one takes at the peak.
    """
    before = _load(url, max_concurrent, seconds / 4)
    assert before["statuses"].keys() == {200}, before["statuses"]
    memory = resident_bytes(pid)
    period = max_concurrent / before["requests_per_second"]
    overload = _load(url, max_concurrent * (factor + 2), seconds, period)
    memory_growth = resident_bytes(pid) - memory
    after = _load(url, max_concurrent, seconds / 4)
    first, health = sorted(overload["first_token_seconds"]), sorted(overload["health_seconds"])
    return {
        "statuses": dict(overload["statuses"]),
        "unanswered": overload["unanswered"],
        "texts": len(before["texts"] | overload["texts"] | after["texts"]),
        "offered_of_peak": overload["statuses"].total() / overload["seconds"] / before["requests_per_second"],
        "tokens_per_second": overload["tokens_per_second"],
        "tokens_per_second_before_and_after": [before["tokens_per_second"], after["tokens_per_second"]],
        "first_token_p50_seconds": first[len(first) // 2],
        "first_token_p99_seconds": first[len(first) * 99 // 100],
        "first_token_bound_seconds": 2 * max_concurrent / overload["requests_per_second"],  # places and queue
        "health_p50_seconds": health[len(health) // 2],
        "health_max_seconds": health[-1],
        "memory_growth_bytes": memory_growth,
    }


def _load(url, num_clients, seconds, period=0.0):
    """Let clients send requests, each at most one per `period`, until the time is over and all have their answers.

    Clients keep their connections, as OpenAI's library does. One thread serves all of them and parses their answers at
    the end, because it shares the processor with the server.
    """
    started, health = time.perf_counter(), []
    deadline = started + seconds
    starts = [(started + period * number / num_clients, number) for number in range(num_clients)]
    clients, answers, counts, num_failed = selectors.DefaultSelector(), [], [_num_tokens(url)], 0
    idle = []  # connections

    def watch():
        while time.perf_counter() < deadline:
            asked = time.perf_counter()
            assert _get(url, "/health")[0] == 200
            health.append(time.perf_counter() - asked)
            time.sleep(0.5)
        counts.append(_num_tokens(url))  # while all places are taken
        counts.append(time.perf_counter() - started)

    watcher = threading.Thread(target=watch)
    watcher.start()
    while clients.get_map() or starts:
        assert time.perf_counter() < deadline + CLIENT_SECONDS, f"{len(clients.get_map())} requests have no answer"
        while starts and starts[0][0] <= (now := time.perf_counter()):
            starts_at, number = heapq.heappop(starts)
            if starts_at >= deadline:
                continue
            try:
                request = StreamedRequest(urlsplit(url).port, "/v1/completions", BODY, _open_connection(idle))
            except OSError:
                num_failed += 1
                heapq.heappush(starts, (now + max(period, 0.01), number))
                continue
            clients.register(request.socket, selectors.EVENT_READ, (request, now, starts_at, number))
        clients.select(max(0.0, min(starts[0][0] - now, 1.0)) if starts else 1.0)
        time.sleep(GATHER_SECONDS)
        for key, _ in clients.select(0):
            request, sent, starts_at, number = key.data
            request.receive()
            if request.is_complete:
                clients.unregister(request.socket)
                request.close() if request.is_closed else idle.append(request.socket)
                if request.is_lost:  # the server closed the connection just before: as any client, send it again
                    heapq.heappush(starts, (starts_at, number))
                    continue
                answers.append((sent, request.parts))
                heapq.heappush(starts, (max(starts_at + period, time.perf_counter()), number))
    watcher.join()
    for connection in idle:
        connection.close()
    before, after, elapsed = counts
    return {
        **_read_answers(answers, num_failed),
        "health_seconds": health,
        "tokens_per_second": (after - before) / elapsed,
        "requests_per_second": (after - before) / BODY["max_tokens"] / elapsed,
        "seconds": elapsed,
    }


def _open_connection(idle):
    """Return an idle connection that the server has not closed, or None."""
    while idle:
        connection = idle.pop()
        if not is_closed_by_peer(connection):
            return connection
        connection.close()
    return None


def _read_answers(answers, num_unanswered):
    """Return what clients got; answers: when each request was sent, and the parts of its answer."""
    found = {"statuses": Counter(), "texts": set(), "first_token_seconds": [], "unanswered": num_unanswered}
    for sent, parts in answers:
        status = re.match(rb"HTTP/1\.1 (\d+) ", b"".join(data for _, data in parts))
        if status is None:
            found["unanswered"] += 1
            continue
        found["statuses"][int(status[1])] += 1
        if status[1] == b"200":
            events = list(parse_answer(parts))
            found["texts"].add("".join(event["choices"][0]["text"] for _, event in events))
            found["first_token_seconds"].append(events[0][0] - sent)
    return found


def ask(url, **changes):
    """Return the status of a request, its text and the time to its first token."""
    connection = _connect(url)
    sent, first, parts = time.monotonic(), None, []
    try:
        connection.request("POST", "/v1/completions", json.dumps({**BODY, **changes}), HEADERS)
        answer = connection.getresponse()
        for line in answer:
            if answer.status == 200 and line.startswith(b"data: {"):
                first = first or time.monotonic() - sent
                parts.append(json.loads(line.removeprefix(b"data: "))["choices"][0]["text"])
        return answer.status, "".join(parts), first
    finally:
        connection.close()


def _connect(url):
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=CLIENT_SECONDS)


def _get(url, path):
    connection = _connect(url)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def _metric(url, name):
    return float(re.search(rf"^clearhead_{name} (\S+)", _get(url, "/metrics")[1], re.MULTILINE)[1])


def _num_tokens(url):
    return _metric(url, "generation_tokens_total")


def resident_bytes(pid):
    """Return the memory that a process has; 0 without a process."""
    if pid is None:
        return 0
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_cancel_storm(url):
    """Let clients go away half a second after their requests; return when the next one has its answer."""
    address = urlsplit(url)
    tokens_before, sockets = _num_tokens(url), []
    for number in range(NUM_CANCELS):
        body = json.dumps({**BODY, "max_tokens": 8000, "stream": number % 2 == 0}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        sockets.append(socket.create_connection((address.hostname, address.port)))
        sockets[-1].sendall(head.encode() + body)
    time.sleep(0.5)
    at_once = _metric(url, "num_requests_running") + _metric(url, "num_requests_waiting")
    for each in sockets:
        each.close()
    asked = time.monotonic()
    status, _, _ = ask(url, max_tokens=4)
    answered_seconds = time.monotonic() - asked
    assert status == 200
    while any(_metric(url, f"num_requests_{name}") for name in ("running", "waiting")):
        assert time.monotonic() < asked + 60, "requests of clients that are gone are still running"
        time.sleep(0.05)
    return {
        "requests_at_once": at_once,
        "next_answer_seconds": answered_seconds,
        "idle_seconds": time.monotonic() - asked,
        "tokens": _num_tokens(url) - tokens_before,
        "cache_usage": _metric(url, "kv_cache_usage_ratio"),
    }


@contextmanager
def started(model, *options, port=0):
    """Start `clearhead serve`; yield the process and its address, and end it."""
    command = [sys.executable, "-m", "clearhead", "serve", model, "--port", str(port), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stderr:
                if found := re.search(r"http://[^:]+:\d+", line):
                    break
            else:
                raise AssertionError("the server did not start")
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield process, found[0]
        finally:
            process.kill()


def run_kill(model):
    """Kill a server while it writes, start it on the same port, and end it. Return the seconds to its first answer."""
    with started(model) as (process, url):
        _, expected, _ = ask(url)
        clients = [threading.Thread(target=_ask_in_vain, args=(url,)) for _ in range(8)]
        for client in clients:
            client.start()
        while not _metric(url, "num_requests_running"):
            time.sleep(0.01)
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
        for client in clients:
            client.join()
    began = time.monotonic()
    with started(model, port=urlsplit(url).port) as (process, again):
        assert (again, ask(again)[:2]) == (url, (200, expected))
        seconds = time.monotonic() - began
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    return {"restart_to_answer_seconds": seconds}


def _ask_in_vain(url):
    try:
        ask(url, max_tokens=2000)
    except (OSError, ValueError, http.client.HTTPException):
        return  # the server was killed


def main():
    """Run everything on a model, print the results, and check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--max-concurrent", type=int, default=8)
    parser.add_argument("--factor", type=int, default=10)
    arguments = parser.parse_args()
    places = str(arguments.max_concurrent)
    with started(arguments.model, "--max-concurrent", places, "--max-queued", places) as (process, url):
        ask(url)
        overload = run_overload(url, arguments.seconds, arguments.max_concurrent, arguments.factor, process.pid)
        print(json.dumps(overload, indent=2), flush=True)
    with started(arguments.model, "--max-concurrent", places, "--max-queued", "300") as (process, url):
        ask(url)
        storm = run_cancel_storm(url)
        print(json.dumps(storm, indent=2), flush=True)
    print(json.dumps(run_kill(arguments.model), indent=2), flush=True)
    assert overload["statuses"].keys() == {200, 429}
    assert overload["unanswered"] == 0
    assert overload["first_token_p99_seconds"] <= overload["first_token_bound_seconds"]
    assert overload["memory_growth_bytes"] < 64 << 20
    assert storm["requests_at_once"] == NUM_CANCELS
    assert storm["next_answer_seconds"] < 5
    assert storm["cache_usage"] == 0
    assert overload["tokens_per_second"] >= 0.9 * max(overload["tokens_per_second_before_and_after"])


if __name__ == "__main__":
    main()
