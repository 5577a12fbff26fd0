"""Measure generation through the public API on an NVIDIA GPU: one text, ragged batches and long prompts.

    python benchmarks/engine_throughput.py llama-3.2-1b llama-3.1-8b --out results.json

The weights are random, since the speed does not depend on them. Every case runs three times in one process; the second
and third call are reported, end to end: from the lists of prompt tokens to the lists of new tokens.
"""

import argparse
import json
import random
import statistics
import time

import torch

from clearhead import Model
from clearhead.backends import pack_network
from clearhead.families import preset
from clearhead.model import Transformer

SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 1}


def random_model(name: str, weights: str) -> Model:
    """Return a model of the real shape with random weights in bfloat16."""
    torch.manual_seed(0)
    with torch.device("meta"):
        network = Transformer(preset(name)).to(torch.bfloat16)
    network = network.to_empty(device="cuda").eval().requires_grad_(False)
    for weight in network.parameters():
        weight.normal_(std=0.02) if weight.ndim > 1 else weight.fill_(1)
    if weights != "bfloat16":
        pack_network(network, weights)
    return Model(network)


def time_calls(model: Model, prompts: list[list[int]], num_new: int, options: dict) -> tuple[float, float]:
    """Return the seconds of the first call, and the median of the two after it."""
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        if len(prompts) == 1:
            texts = [model.generate(prompts[0], max_new_tokens=num_new, **options)]
        else:
            texts = model.generate_many(prompts, max_new_tokens=num_new, **options)
        seconds.append(time.perf_counter() - start)
        assert all(len(text.tokens) == num_new for text in texts)
    return seconds[0], statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["llama-3.2-1b"])
    parser.add_argument("--weights", choices=("bfloat16", "int8", "int4"), default="bfloat16")
    parser.add_argument("--cases", default="one,64,256,long")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    rng, results = random.Random(0), []
    for name in arguments.models:
        model = random_model(name, arguments.weights)
        vocab_size = model.config.vocab_size

        def prompt(length: int, vocab_size: int = vocab_size) -> list[int]:
            return [rng.randrange(vocab_size) for _ in range(length)]

        cases = {
            "one": ([prompt(128)], 512),
            "64": ([prompt(rng.randint(16, 256)) for _ in range(64)], 256),
            "256": ([prompt(rng.randint(16, 256)) for _ in range(256)], 256),
            "long": ([prompt(6000)], 1),
        }
        for case in arguments.cases.split(","):
            prompts, num_new = cases[case]
            for mode, options in (("greedy", {}), ("sampled", SAMPLED)):
                first, seconds = time_calls(model, prompts, num_new, options)
                results.append(
                    {"model": name, "weights": arguments.weights, "case": case, "mode": mode}
                    | {"tokens_per_second": round(len(prompts) * num_new / seconds, 1)}
                    | {"seconds": round(seconds, 4), "first_call_seconds": round(first, 3)}
                )
                print(json.dumps(results[-1]), flush=True)
                if arguments.out:
                    with open(arguments.out, "w") as file:
                        json.dump(results, file, indent=1)
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
