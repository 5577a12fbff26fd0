"""Measure decoding and prefill speed of Clearhead and other inference engines in one run; what `clearhead bench` shows.

    engines = open_engines(target, ["bfloat16"], ["llama.cpp"], notify=print)
    results = measure_speed(engines, target, prompt_length=128, num_tokens=128, rounds=5)

inference_engine               InferenceEngine: anything that continues a prompt greedily
clearhead_engine               Clearhead, in each weight format
huggingface, llamacpp, ctranslate2   the other engines
engines                        opens the requested engines
target                         the model to measure, and the files that engines load it from
measurement                    rounds in which all engines alternate, and medians over them
memory_traffic                 bytes read per token, and the read bandwidth of this machine
report                         tables in the terminal
"""

from clearhead.benchmark.ctranslate2 import convert_to_ctranslate2
from clearhead.benchmark.engines import check_engine_names, open_engines
from clearhead.benchmark.measurement import PAUSE_SECONDS, measure_growth, measure_speed, num_runs
from clearhead.benchmark.memory_traffic import total_weight_bytes
from clearhead.benchmark.report import print_growth, print_speeds
from clearhead.benchmark.target import BenchmarkTarget, create_random_model

__all__ = [
    "PAUSE_SECONDS",
    "BenchmarkTarget",
    "check_engine_names",
    "convert_to_ctranslate2",
    "create_random_model",
    "measure_growth",
    "measure_speed",
    "num_runs",
    "open_engines",
    "print_growth",
    "print_speeds",
    "total_weight_bytes",
]
