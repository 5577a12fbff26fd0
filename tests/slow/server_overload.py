"""Offer a server ten times what it can take, and count what becomes of the requests.

    python -m tests.slow.server_overload smollm2 --seconds 120

Every request must be answered with 200 or 429; accepted ones must have the same text as alone; the rate of tokens must
not break down; and the time to the first token of accepted requests stays bounded by the queue.
"""

import argparse
import json
import threading
import time
from collections import Counter

import httpx2

BODY = {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0, "ignore_eos": True, "stream": True}


def run(model, seconds, max_concurrent, factor):
    """Return the numbers of answers by status, rates of tokens per second and times to the first token.

    A first phase with `max_concurrent` clients measures the peak; the second has `factor` times as many.
    """
    from tests.server.toys import serve

    with serve(model, max_concurrent=max_concurrent, max_queued=max_concurrent) as server:
        peak = _load(server.url, max_concurrent, seconds / 2)
        overload = _load(server.url, max_concurrent * factor, seconds)
        server.wait_until_idle(30)
        started = time.monotonic()
        assert server.get("/health").status_code == 200
        health_seconds = time.monotonic() - started
    first = sorted(overload["first_token_seconds"])
    return {
        "statuses": overload["statuses"],
        "unanswered": overload["unanswered"],
        "texts": len(peak["texts"] | overload["texts"]),
        "peak_tokens_per_second": peak["tokens"] / peak["seconds"],
        "tokens_per_second": overload["tokens"] / overload["seconds"],
        "first_token_p50_seconds": first[len(first) // 2],
        "first_token_p99_seconds": first[len(first) * 99 // 100],
        "health_seconds": health_seconds,
    }


def _load(url, num_clients, seconds):
    """Let clients send one request after another; one that is refused waits a moment."""
    found = {"statuses": Counter(), "tokens": 0, "texts": set(), "first_token_seconds": [], "unanswered": 0}
    lock, deadline, started = threading.Lock(), time.monotonic() + seconds, time.monotonic()

    def client():
        with httpx2.Client(base_url=url, timeout=120) as connection:
            while time.monotonic() < deadline:
                try:
                    status, text, first = _ask(connection)
                except httpx2.HTTPError:
                    with lock:
                        found["unanswered"] += 1
                    continue
                with lock:
                    found["statuses"][status] += 1
                    if status == 200:
                        found["tokens"] += BODY["max_tokens"]
                        found["texts"].add(text)
                        found["first_token_seconds"].append(first)
                if status != 200:
                    time.sleep(0.05)

    threads = [threading.Thread(target=client) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {**found, "seconds": time.monotonic() - started}


def _ask(connection):
    """Return the status of a request, its text and the time to its first token."""
    sent, first, parts = time.monotonic(), None, []
    with connection.stream("POST", "/v1/completions", json=BODY) as answer:
        for line in answer.iter_lines():
            if answer.status_code == 200 and line.startswith("data: {"):
                first = first or time.monotonic() - sent
                parts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
    return answer.status_code, "".join(parts), first


def main():
    """Run the load on a model and print the result."""
    import clearhead

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--max-concurrent", type=int, default=8)
    parser.add_argument("--factor", type=int, default=10)
    arguments = parser.parse_args()
    result = run(clearhead.load(arguments.model), arguments.seconds, arguments.max_concurrent, arguments.factor)
    print(json.dumps(result, indent=2))
    assert result["statuses"].keys() <= {200, 429}
    assert result["unanswered"] == 0
    assert result["tokens_per_second"] >= 0.9 * result["peak_tokens_per_second"]


if __name__ == "__main__":
    main()
