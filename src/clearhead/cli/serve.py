"""The command serve: OpenAI's API in front of a model.

clearhead serve smollm2 --port 8000
"""

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.app import ModelArgument, app, print_message
from clearhead.cli.checks import check_files, check_installed, check_model_options
from clearhead.cli.generate import DeviceOption, DtypeOption, FastOption, WeightsOption, load_model
from clearhead.cli.threads import takes_threads
from clearhead.errors import ClearheadError
from clearhead.parallel import current_launch

NEEDED_TO_SERVE = ("starlette", "uvicorn", "prometheus_client")  # the extra `serve`
_KEY_VARIABLE = "CLEARHEAD_API_KEY"
_MAX_KEY_FILE_BYTES = 1 << 20
_ADDRESS = {"rich_help_panel": "Address and access"}
_LOAD = {"rich_help_panel": "Load"}

_KeysOption = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Key that clients must send; may be repeated. Other users of this machine see it: rather use "
        f"--api-key-file or the variable {_KEY_VARIABLE}.",
        **_ADDRESS,
    ),
]
_KeyFileOption = Annotated[
    Path | None, typer.Option(help="File with keys that clients may send, one per line.", **_ADDRESS)
]
_HostsOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Host header to accept besides localhost, such as the name of a proxy; may be repeated.", **_ADDRESS
    ),
]
_OriginsOption = Annotated[
    list[str] | None,
    typer.Option(help="Web site whose pages may call the server (CORS); may be repeated.", **_ADDRESS),
]
_DeterministicOption = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Make an answer independent of the other requests, bit for bit, even where that is slower. The CPU "
        "kernels always do so if the processor has AVX-512.",
        rich_help_panel="Speed",
    ),
]
_GatherOption = Annotated[
    float,
    typer.Option(
        help="With more than four requests at once, the new tokens of a text are sent together, at most this many "
        "seconds apart; 0 sends every token by itself, which takes more of the processor.",
        rich_help_panel="Speed",
    ),
]
_ShutdownOption = Annotated[
    float,
    typer.Option("--shutdown-timeout", help="Seconds that running requests get after SIGTERM or Ctrl-C.", **_LOAD),
]


@app.command(
    epilog="Examples: `clearhead serve smollm2`, `clearhead serve smollm2 --weights int4 --port 8080 --alias gpt-4o`. "
    "Then: `curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d "
    """'{"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}]}'`"""
)
@takes_threads
def serve(
    model: ModelArgument,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on: 127.0.0.1 for this machine only, 0.0.0.0 for every network.", **_ADDRESS
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any free one.", **_ADDRESS)] = 8000,
    api_key: _KeysOption = None,
    api_key_file: _KeyFileOption = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            help="Another name of the model, for clients with a fixed model name; may be repeated.", **_ADDRESS
        ),
    ] = None,
    allow_host: _HostsOption = None,
    allow_origin: _OriginsOption = None,
    max_concurrent: Annotated[
        int | None,
        typer.Option(help="Maximum number of texts generated at once; by default 256 on a GPU, 32 on a CPU.", **_LOAD),
    ] = None,
    max_queued: Annotated[
        int, typer.Option(help="Maximum number of waiting texts; further requests get status 429.", **_LOAD)
    ] = 512,
    max_new_tokens: Annotated[
        int,
        typer.Option(help="Maximum number of new tokens of one text; the model's context limits it too.", **_LOAD),
    ] = 32_768,
    memory_gb: Annotated[
        float | None,
        typer.Option(help="Memory for the KV cache in GB; by default a share of the free memory.", **_LOAD),
    ] = None,
    shutdown_seconds: _ShutdownOption = 30.0,
    gather_seconds: _GatherOption = 0.05,
    deterministic: _DeterministicOption = False,
    runs: Annotated[Path | None, typer.Option(help="Folder of training runs that the page shows.")] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    weights: WeightsOption = "full",
    fast: FastOption = None,
) -> None:
    """Serve a model over HTTP: OpenAI's API, and a web page to chat with the model and inspect it.

    Chats, completions, responses and embeddings are under /v1, the page is at /, measurements for Prometheus at
    /metrics. The port is open while the model loads; /health says when it is ready. SIGTERM or Ctrl-C lets running
    requests finish; a second one ends them. The exit code is 0 if all requests were answered.

    `torchrun --nproc-per-node 2 -m clearhead serve MODEL` splits the model between two processes.
    """
    check_installed(NEEDED_TO_SERVE, "the server", "serve")
    check_model_options(model, dtype, device, weights)
    _check_processes(weights, fast)
    keys = _read_keys(api_key or [], api_key_file)
    from clearhead.server import Limits, ServerSettings

    settings = ServerSettings(
        host=host,
        port=port,
        aliases=tuple(alias or ()),
        api_keys=keys,
        allowed_hosts=tuple(allow_host or ()),
        allowed_origins=tuple(allow_origin or ()),
        max_concurrent=max_concurrent,
        max_queued=max_queued,
        gather_seconds=gather_seconds,
        shutdown_seconds=shutdown_seconds,
        deterministic=deterministic,
        memory=None if memory_gb is None else _as_bytes(memory_gb),
        runs=runs,
        limits=Limits(max_new_tokens=max_new_tokens),
    )
    if not settings.listens_on_loopback and not keys and current_launch().is_main:
        print_message("note", f"anybody who can reach {host} can use this server; --api-key-file sets keys")
    from clearhead.server import run_server

    name = Path(model).stem if model.lower().endswith(".gguf") else Path(model).name or model
    is_divided = current_launch().size > 1  # each process loads the model to the CPU and keeps its part
    load = partial(load_model, model, dtype, "cpu" if is_divided else device, weights, False if is_divided else fast)
    raise typer.Exit(run_server(load, name, settings, partial(print_message, "note"), device))


def _check_processes(weights: str, fast: bool | None) -> None:
    """Raise ClearheadError if several processes cannot serve with these options."""
    if current_launch().size > 1 and (weights != "full" or fast):
        if not current_launch().is_main:
            raise typer.Exit(1)  # the first process says why
        option = "--fast" if fast else f"--weights {weights}"
        raise ClearheadError(
            f"a model that several processes share runs in PyTorch's modules with full weights; leave out {option}"
        )


def _read_keys(given: list[str], path: Path | None) -> tuple[str, ...]:
    """Return the keys of the command line, the environment and a file."""
    keys = list(given)
    if variable := os.environ.get(_KEY_VARIABLE):
        keys.append(variable)
    if path is not None:
        check_files([path])
        with path.open("rb") as file:
            lines = file.read(_MAX_KEY_FILE_BYTES).decode("utf-8", "replace").splitlines()
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise ClearheadError(f"{path} has no key; write one key per line")
        keys += found
    return tuple(keys)


def _as_bytes(gigabytes: float) -> int:
    if not 0 < gigabytes < 1e6:
        raise ClearheadError(f"--memory-gb is {gigabytes:g}; it must be greater than 0")
    return round(gigabytes * 1e9)
