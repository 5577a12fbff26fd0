"""`clearhead serve` as a process of its own: ready, drained, aborted, killed, restarted (A19, A20, S9, S10)."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx2
import pytest

from clearhead.api import Model
from tests.checkpoint.tiny import tiny_network
from tests.server.toys import TemplateTokenizer

LONG = {"prompt": "Hello", "max_tokens": 20_000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "toy"
    tokenizer = TemplateTokenizer()
    Model(tiny_network(vocab_size=tokenizer.vocab_size, context=32_768), tokenizer.inner).save(path)
    return path


@contextmanager
def streaming(folder, body, seconds):
    """Start the command with a --shutdown-timeout and a stream; yield the process, its address and the next lines."""
    with (
        started(folder, "--shutdown-timeout", str(seconds)) as (process, url),
        httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        yield process, url, lines


@contextmanager
def started(folder, *options, port=0, **environment):
    """Start the command and yield the process and its address."""
    command = [sys.executable, "-m", "clearhead", "serve", str(folder), "--port", str(port), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}) as process:
        lines = []
        try:
            for line in process.stderr:
                lines.append(line)
                if found := re.search(r"http://[^:]+:\d+", line):
                    break
            else:
                raise AssertionError("".join(lines))
            reader = threading.Thread(target=lambda: lines.extend(process.stderr))
            reader.start()
            process.lines = lines
            yield process, found[0]
        finally:
            process.kill()
        reader.join()


def wait_until_draining(url):
    """Wait until the server has noticed a signal."""
    deadline = time.monotonic() + 60
    while httpx2.get(f"{url}/health", timeout=60).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_sigterm_lets_requests_finish_and_refuses_new_ones(folder):
    body = {**LONG, "max_tokens": 2000}
    with streaming(folder, body, seconds=60) as (process, url, lines):
        process.send_signal(signal.SIGTERM)
        wait_until_draining(url)
        late = httpx2.post(f"{url}/v1/completions", json=body, timeout=60)
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "unavailable"
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(30) == 0


def test_a_second_signal_ends_requests_with_an_error_event(folder):
    with streaming(folder, LONG, seconds=60) as (process, url, lines):
        process.send_signal(signal.SIGTERM)
        wait_until_draining(url)
        process.send_signal(signal.SIGTERM)
        assert '"error"' in [line for line in lines if line][-1]
        assert process.wait(30) == 128 + signal.SIGTERM
        assert not any("Traceback" in line for line in process.lines)


def test_a_timeout_of_zero_ends_requests_at_once(folder):
    with streaming(folder, LONG, seconds=0) as (process, _, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 128 + signal.SIGINT


def test_a_killed_server_restarts_on_the_same_port(folder):
    with started(folder) as (process, url):
        assert httpx2.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 2, "stream": False}).status_code == 200
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
    with started(folder, port=int(url.rsplit(":", 1)[1])) as (process, again):
        assert again == url
        assert httpx2.get(f"{url}/health").json() == {"status": "ok"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_keys_come_from_the_environment_and_prompts_are_not_logged(folder):
    options = ("--host", "0.0.0.0")
    with started(folder, *options, CLEARHEAD_API_KEY="secret-key") as (process, url):
        url = url.replace("0.0.0.0", "127.0.0.1")
        assert httpx2.post(f"{url}/v1/completions", json={"prompt": "hidden"}, timeout=60).status_code == 401
        headers = {"Authorization": "Bearer secret-key"}
        body = {"prompt": "hidden", "max_tokens": 2, "logit_bias": {"x": 1}}
        assert httpx2.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).status_code == 400
        with open(f"/proc/{process.pid}/cmdline", encoding="utf-8") as file:
            assert "secret-key" not in file.read()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        log = "".join(process.lines)
        assert "secret-key" not in log
        assert "hidden" not in log
        assert "everybody" not in log
    with started(folder, *options) as (process, url):
        assert any("anybody who can reach 0.0.0.0 can use this server" in line for line in process.lines)


def test_an_alias_that_is_the_name_is_listed_once(folder):
    with started(folder, "--alias", folder.name, "--alias", "other") as (_, url):
        while (answer := httpx2.get(f"{url}/v1/models")).status_code == 503:
            time.sleep(0.05)
    assert [model["id"] for model in answer.json()["data"]] == [folder.name, "other"]
