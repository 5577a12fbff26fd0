"""Measure generation through the public API on an NVIDIA GPU: one text, ragged batches and long prompts.

    python benchmarks/engine_throughput.py --out results                        every model of MODELS, about 5 minutes
    python benchmarks/engine_throughput.py llama-3.2-1b --weights int8 --cases one,64

The weights are random, since the speed does not depend on them. Every model runs in a process of its own, so that one
that fails does not end the others; its results are in OUT/MODEL-WEIGHTS.json after each case. Every case runs two or
three times; the calls after the first are reported, end to end: from the lists of prompt tokens to the lists of new
tokens. Beside each is the share of the limit by bytes and FLOPs that `clearhead cost` computes for the H200.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from clearhead import Model, cost
from clearhead.architecture import ModelConfig
from clearhead.backends import pack_network
from clearhead.families import preset
from clearhead.model import Transformer

SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 1}
# Weights and cases of each model: "one" text of 512 tokens, 64 or 256 ragged prompts, a "long" prompt of 6,000 tokens.
MODELS = [
    ("t5-v1.1-base", "bfloat16", "one,64"),
    ("transformer-base", "bfloat16", "one,64"),
    ("llama-3.2-1b", "bfloat16", "one,64,256,long"),
    ("smollm3-3b", "bfloat16", "one"),
    ("llama-3.1-8b", "bfloat16", "one,256,long"),
    ("llama-3.1-8b", "int8", "one"),
    ("deepseek-v2-lite", "bfloat16", "one"),
    ("qwen3-30b-a3b", "bfloat16", "one"),
]
_SHORT = 1.5  # seconds of a call below which it is made a third time
_MAX_SECONDS = 150  # of one model, with compiling its kernels


def preset_with_layers(name: str, num_layers: int | None) -> ModelConfig:
    """Return the config of a preset with its first layers only; None: with all."""
    config = preset(name)
    if num_layers is not None and config.decoder is not None:
        config = replace(config, decoder=replace(config.decoder, layers=config.decoder.layers[:num_layers]))
    return config


def random_model(name: str, weights: str, device: str = "cuda", num_layers: int | None = None) -> Model:
    """Return a model of the real shape with random weights. num_layers: keep only so many; None: all."""
    torch.manual_seed(0)
    with torch.device("meta"):
        network = Transformer(preset_with_layers(name, num_layers)).to(torch.bfloat16)
    network = network.to_empty(device=device).eval().requires_grad_(False)
    for weight in network.parameters():
        weight.normal_(std=0.02) if weight.ndim > 1 else weight.fill_(1)
    if weights != "bfloat16":
        pack_network(network, weights)
    return Model(network)


def make_cases(vocab_size: int) -> dict[str, tuple[list[list[int]], int]]:
    """Return prompts, which are the sources of an encoder-decoder, and the number of new tokens of each case."""
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(length)]

    def ragged(count: int) -> list[list[int]]:
        return [prompt(rng.randint(16, 256)) for _ in range(count)]

    return {
        "one": ([prompt(128)], 512),
        "64": (ragged(64), 256),
        "256": (ragged(256), 256),
        "long": ([prompt(6000)], 1),
    }


def time_calls(model: Model, prompts: list[list[int]], num_new: int, options: dict) -> list[float]:
    """Return the seconds of two calls, or of three if they are short."""
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) < 3 and seconds[-1] < _SHORT):
        torch.cuda.synchronize()
        start = time.perf_counter()
        if len(prompts) == 1:
            texts = [model.generate(prompts[0], max_new_tokens=num_new, **options)]
        else:
            texts = model.generate_many(prompts, max_new_tokens=num_new, **options)
        seconds.append(time.perf_counter() - start)
        assert all(len(text.tokens) == num_new for text in texts)
    return seconds


def limit_seconds(model: Model, weights: str, prompts: list[list[int]], num_new: int) -> float:
    """Return the least time of a case by `clearhead cost`: reading the prompts, and steps of the mean length."""
    mean = sum(map(len, prompts)) // len(prompts)
    settings = {"device": "h200", "batch": len(prompts), "weights": "full" if weights == "bfloat16" else weights}
    has_encoder = model.config.is_encoder_decoder
    source = {"source": mean} if has_encoder else {}
    read = cost(model.config, phase="prefill", context=1 if has_encoder else mean, **source, **settings)
    if num_new == 1:
        return read.bound.seconds
    length = num_new // 2 + (0 if has_encoder else mean)
    step = cost(model.config, phase="decode", context=length, **source, **settings)
    return read.bound.seconds + (num_new - 1) * step.bound.seconds


def measure(name: str, weights: str, cases: list[str], folder: Path | None) -> None:
    """Measure one model in this process, and write its results after each case."""
    model, results = random_model(name, weights), []
    print(repr(model), flush=True)
    for case, (prompts, num_new) in make_cases(model.config.vocab_size).items():
        for mode, options in (("greedy", {}), ("sampled", SAMPLED)) if case in cases else ():
            first, *later = time_calls(model, prompts, num_new, options)
            seconds = statistics.median(later)
            results.append(
                {"model": name, "weights": weights, "case": case, "mode": mode}
                | {"tokens_per_second": round(len(prompts) * num_new / seconds, 1), "seconds": round(seconds, 4)}
                | {"share_of_limit": round(limit_seconds(model, weights, prompts, num_new) / seconds, 3)}
                | {"first_call_seconds": round(first, 3), "calls": [round(each, 4) for each in later]}
            )
            print(json.dumps(results[-1]), flush=True)
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{name}-{weights}.json").write_text(json.dumps(results, indent=1))


def measure_in_processes(models: list[tuple[str, str, str]], folder: Path) -> None:
    """Measure each model in a process of its own, and print a table of what succeeded."""
    for name, weights, cases in models:
        command = [sys.executable, __file__, name, "--weights", weights, "--cases", cases, "--out", str(folder)]
        try:
            code = subprocess.run(command, timeout=_MAX_SECONDS, check=False).returncode
        except subprocess.TimeoutExpired:
            code = f"no end after {_MAX_SECONDS} seconds"
        if code != 0:
            print(f"{name} in {weights} failed: {code}", flush=True)
    rows = [row for path in sorted(folder.glob("*.json")) for row in json.loads(path.read_text())]
    print(f"{'model':18} {'weights':9} {'case':5} {'mode':8} {'tokens/s':>10} {'seconds':>9} {'of limit':>8}")
    for row in rows:
        print(
            f"{row['model']:18} {row['weights']:9} {row['case']:5} {row['mode']:8} {row['tokens_per_second']:10,.0f} "
            f"{row['seconds']:9.3f} {row['share_of_limit']:8.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="measure this model only; default: all of MODELS")
    parser.add_argument("--weights", choices=("bfloat16", "int8", "int4"), default="bfloat16")
    parser.add_argument("--cases", default="one,64,256,long")
    parser.add_argument("--out", type=Path, help="folder of the results")
    arguments = parser.parse_args()
    if arguments.model is None:
        measure_in_processes(MODELS, arguments.out or Path("results"))
    else:
        measure(arguments.model, arguments.weights, arguments.cases.split(","), arguments.out)


if __name__ == "__main__":
    main()
