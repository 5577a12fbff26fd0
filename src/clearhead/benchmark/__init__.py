"""Measure the speed of Clearhead and other inference engines in one run; what `clearhead bench` shows.

    engines = open_engines(target, ["bfloat16"], ["llama.cpp"], notify=print)
    results = measure_speed(engines, target, prompt_length=128, num_tokens=128, rounds=5)

engines                        opens the requested engines
target                         the model to measure, and the files that engines load it from
report                         tables in the terminal

One text at a time:
inference_engine               InferenceEngine: anything that continues a prompt greedily
clearhead_engine               Clearhead, in each weight format
huggingface, llamacpp, ctranslate2   the other engines
measurement                    rounds in which all engines alternate, and medians over them
memory_traffic                 bytes read per token, and the read bandwidth of this machine

Many requests at once:
serving_engine                 ServingEngine: anything that answers many requests at once
clearhead_serving, huggingface_serving    engines in this process
server_process                 ServerProcess: a server that is asked over HTTP
clearhead_server, llamacpp_server    the servers
streamed_request               an HTTP request whose answer is a stream of events
serving_load                   clients, and when their tokens arrive
serving_result                 throughput and percentiles
serving                        rounds in which all engines alternate
"""

from clearhead.benchmark.ctranslate2 import convert_to_ctranslate2
from clearhead.benchmark.engines import check_engine_names, open_engines, open_serving_engines
from clearhead.benchmark.measurement import PAUSE_SECONDS, measure_growth, measure_speed, num_runs
from clearhead.benchmark.memory_traffic import total_weight_bytes
from clearhead.benchmark.report import print_growth, print_serving, print_speeds
from clearhead.benchmark.serving import measure_serving, num_serving_runs
from clearhead.benchmark.serving_load import Load
from clearhead.benchmark.target import BenchmarkTarget, create_random_model

__all__ = [
    "PAUSE_SECONDS",
    "BenchmarkTarget",
    "Load",
    "check_engine_names",
    "convert_to_ctranslate2",
    "create_random_model",
    "measure_growth",
    "measure_serving",
    "measure_speed",
    "num_runs",
    "num_serving_runs",
    "open_engines",
    "open_serving_engines",
    "print_growth",
    "print_serving",
    "print_speeds",
    "total_weight_bytes",
]
