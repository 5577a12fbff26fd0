"""The server: OpenAI's API in front of any model that Clearhead loads, and the web page.

    exit_code = run_server(lambda: load("smollm2"), "smollm2", ServerSettings(port=8000), announce)

A request passes through these modules:

settings            addresses, keys, limits
lifecycle           listen, load, serve, drain
processes           one server in several processes, which divide the model
protocol            time limits of connections, and writing without waiting
app                 the routes behind the guard
security            Guard: hosts, keys, ids of requests, uncaught errors
routes              from HTTP to the functions below and back
requests            read bodies within limits
state, service      what the server is doing; the model with its engine, queue and threads
admission           how many texts may wait
schema_parts, schemas, response_schemas, json_checks, json_text
                    the fields of requests as JSON Schema, and their checks
fields, messages    JSON to typed requests
tool_fields, tool_syntax, tool_readers, tool_messages
                    functions that the model may call: fields, formats, calls in texts, messages
prompts             prompts and messages to requests for the engine
completions, chat, responses, embeddings, tokenize
                    one module per endpoint: objects in, objects out
structured_output   response_format by a grammar
job, events, choice, token_scores
                    the texts of a request: from the engine's events to pieces of text
answers, streaming, stream_events
                    complete answers and server-sent events
threads             computations beside the engine
sequential_worker   texts of models that the engine cannot run
metrics, openapi    measurements for Prometheus; the OpenAPI document
api_errors          ApiError: errors in OpenAI's form
page_routes         the web page, and the routes that it calls
inspection_data, inspection_fields, inspection_json, inspection_lens, inspection_traces
                    what the model computed, as JSON objects for the page
model_json, request_cost, training_runs
                    what the model is; what a request cost; training runs

docs/serving.md explains how to run it and what it promises. Names are imported on first use, so that a wrong setting is
answered before torch is imported.
"""

from typing import TYPE_CHECKING

from clearhead.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from clearhead.server.app import create_app
    from clearhead.server.lifecycle import run_server
    from clearhead.server.service import Service
    from clearhead.server.settings import Limits, ServerSettings
    from clearhead.server.state import ServerState

__all__ = ["Limits", "ServerSettings", "ServerState", "Service", "create_app", "run_server"]

__getattr__ = lazy_exports(
    __name__,
    {
        "app": ["create_app"],
        "lifecycle": ["run_server"],
        "service": ["Service"],
        "settings": ["Limits", "ServerSettings"],
        "state": ["ServerState"],
    },
)
