"""Test `clearhead serve` under load: what is asked of it, and the server itself."""

import json
from dataclasses import replace

import pytest
import torch

from clearhead.benchmark import open_serving_engines
from clearhead.benchmark.clearhead_server import ClearheadServer
from clearhead.benchmark.clearhead_serving import ClearheadServing
from clearhead.benchmark.serving_load import Load, LoadRun, run_load
from clearhead.benchmark.serving_result import summarize
from clearhead.engine.engine import PAGE_SIZE
from clearhead.engine.memory import pages_for_memory
from clearhead.errors import ClearheadError
from clearhead.server import Limits
from clearhead.server.fields import read_completion

LOAD = Load(concurrency=3, num_requests=6, prompt_length=6, num_tokens=10)


def run_of(seconds):
    return LoadRun(seconds, [0.1] * 6, [0.1] * 54, 60)


def test_it_is_measured_only_if_that_is_asked_for(target):
    assert [str(each) for each in open_serving_engines(target, ["int8"], [], print)] == ["clearhead int8"]
    engines = open_serving_engines(target, ["int8", "float32"], [], print, over_http=True)
    assert [str(each) for each in engines] == [
        "clearhead int8", "clearhead float32", "clearhead serve int8", "clearhead serve float32",
    ]  # fmt: skip


def test_the_command_names_the_model_its_format_and_a_place_for_each_client(target, tmp_path):
    engine = ClearheadServer(replace(target, path=tmp_path / "toy.gguf"), "int4")
    engine.port = 1234
    command = engine.command(5, 100)
    assert command[1:5] == ["-m", "clearhead", "serve", str(tmp_path / "toy.gguf")]
    options = dict(zip(command[5::2], command[6::2], strict=True))
    assert (options["--port"], options["--max-concurrent"], options["--weights"]) == ("1234", "5", "int4")
    assert options["--threads"] == str(target.num_threads)
    in_process = ClearheadServing(target, "int8")
    in_process.open(5, 100)
    memory = round(float(options["--memory-gb"]) * 1e9)
    stack = target.model.config.output_stack
    pages = pages_for_memory(stack, torch.bfloat16, torch.device("cpu"), PAGE_SIZE, memory)
    assert pages == in_process.engine.scheduler.pool.num_pages
    with pytest.raises(ClearheadError, match=r"needs a \.gguf file"):
        ClearheadServer(target, "stored")


def test_the_server_reads_the_request_as_it_is_meant(target):
    body = ClearheadServer(target, "float32").request_body([3, 4], 9)
    asked = read_completion(json.loads(json.dumps(body)), Limits(), vocab_size=96)
    assert asked.prompts == [[3, 4]]
    assert asked.stream
    assert asked.continuous_usage
    assert asked.ignore_eos
    assert asked.max_tokens == 9
    assert asked.options["temperature"] == 0


def test_ratios_compare_the_engine_and_the_server_with_each_engine_round_by_round(target):
    ours, server = ClearheadServing(target, "int8"), ClearheadServer(target, "int8")
    our_runs, server_runs = [run_of(1.0), run_of(2.0), run_of(4.0)], [run_of(2.0), run_of(2.0), run_of(5.0)]
    of_ours = summarize(ours, LOAD, our_runs, our_runs, server_runs)
    assert (of_ours.clearhead_ratio, of_ours.server_ratio, of_ours.server_ratio_range) == (None, 0.8, (0.5, 1.0))
    of_server = summarize(server, LOAD, server_runs, our_runs, server_runs)
    assert (of_server.clearhead_ratio, of_server.server_ratio) == (1.25, None)


def test_the_real_server_answers_every_request(target):
    engine = ClearheadServer(target, "float32")
    try:
        engine.open(LOAD.concurrency, LOAD.capacity)
        prompts = LOAD.prompts(96, "a")
        run = run_load(engine, prompts, LOAD.concurrency, LOAD.num_tokens)
        assert len(run.token_seconds) == LOAD.num_requests * (LOAD.num_tokens - 1)
        process = engine.process
    finally:
        engine.close()
    assert process.poll() is not None
