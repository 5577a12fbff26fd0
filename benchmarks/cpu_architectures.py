"""Tokens per second of architectures in their released shapes, in PyTorch and in the CPU kernels.

    python benchmarks/cpu_architectures.py pythia-160m bloom-560m olmoe-1b-7b:4 --weights bfloat16,int8
    python benchmarks/cpu_architectures.py marian t5-small --texts 32 --prompt-tokens 40

`:4` keeps the first four layers. The weights are random, since the speed hardly depends on them. Each model generates
greedily through `model.generate`, or `generate_many` for several texts with prompts (or sources) of up to
`--prompt-tokens` tokens, first in the modules, then in the kernels. The median and the range of the calls are printed,
reading the prompts included.
"""

import argparse
import statistics
import time
from dataclasses import replace

import torch

from clearhead import Model
from clearhead.backends import accelerate, pack_network
from clearhead.families import preset
from clearhead.model import Transformer


def random_network(name: str, weights: str) -> Transformer:
    """Return the network of a preset, cut to the given number of layers, with random weights."""
    name, _, num_layers = name.partition(":")
    config = preset(name)
    if num_layers and config.decoder is not None:
        config = replace(config, decoder=replace(config.decoder, layers=config.decoder.layers[: int(num_layers)]))
    torch.manual_seed(0)
    with torch.device("meta"):
        network = Transformer(config).to(torch.bfloat16)
    network = network.to_empty(device="cpu").eval().requires_grad_(False)
    for weight in network.parameters():
        weight.normal_(std=0.02) if weight.ndim > 1 else weight.fill_(1)
    for buffer in network.buffers():
        buffer.zero_()
    return pack_network(network, weights) if weights in ("int8", "int4") else network  # type: ignore[arg-type]


def ragged_prompts(count: int, longest: int) -> list[list[int]]:
    """Return one prompt of `longest` tokens, or prompts of a fifth of that up to all of it."""
    lengths = [longest - number * 4 * longest // (5 * count) for number in range(count)]
    return [list(range(5 + number, 5 + number + length)) for number, length in enumerate(lengths)]


def speeds(model: Model, prompts: list[list[int]], num_new: int, rounds: int) -> str:
    """Return the median and the range of the tokens per second of several calls, after one that is not counted."""
    found = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        results = model.generate_many(prompts, max_new_tokens=num_new, min_new_tokens=num_new)
        found.append(sum(len(result.tokens) for result in results) / (time.perf_counter() - start))
    return f"{statistics.median(found[1:]):.1f} ({min(found[1:]):.1f} to {max(found[1:]):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+")
    parser.add_argument("--weights", default="bfloat16")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    prompts = ragged_prompts(arguments.texts, arguments.prompt_tokens)
    for name in arguments.models:
        for weights in arguments.weights.split(","):
            network = random_network(name, weights)
            plain = speeds(Model(network), prompts, arguments.new_tokens, arguments.rounds)
            assert accelerate(network), f"the CPU kernels do not support {name}"
            fast = speeds(Model(network), prompts, arguments.new_tokens, arguments.rounds)
            print(f"{name} {weights}: PyTorch {plain}, kernels {fast} tokens/s", flush=True)


if __name__ == "__main__":
    main()
