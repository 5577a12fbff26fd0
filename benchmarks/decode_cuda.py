"""Decoding in a CUDA graph: tokens per second and peak memory, one row and many, in bfloat16 and int8.

    python benchmarks/decode_cuda.py llama-3.2-1b llama-3-8b

Random weights of the named shape: the speed does not depend on them. One JSON line for each measurement.
"""

import json
import statistics
import sys
import time

import torch

from clearhead.families import preset
from clearhead.fast.cuda import GraphDecoder
from clearhead.model.transformer import Transformer

PROMPT, CAPACITY, NUM_TOKENS, ROUNDS = 128, 512, 100, 3
CASES = ((1, None), (1, "int8"), (64, None))  # rows, bits


def draw(name: str) -> Transformer:
    torch.manual_seed(0)
    with torch.device("meta"):
        network = Transformer(preset(name)).to(torch.bfloat16)
    network = network.to_empty(device="cuda").eval().requires_grad_(False)
    for weight in network.parameters():
        weight.normal_(std=0.02) if weight.ndim > 1 else weight.fill_(1)
    return network


def measure(network: Transformer, batch: int, bits: str | None) -> dict[str, float]:
    torch.cuda.reset_peak_memory_stats()
    decoder = GraphDecoder(network, batch, CAPACITY, lambda logits, steps: logits.argmax(-1))
    decoder.start(decoder.read(torch.randint(0, 1000, (batch, PROMPT)).tolist()).argmax(-1))
    seconds = []
    for _ in range(ROUNDS):
        decoder.position.fill_(PROMPT)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(NUM_TOKENS):
            decoder.next()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / NUM_TOKENS)
    return {
        "tokens_per_second": batch / statistics.median(seconds),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "weight_bytes": sum(weight.numel() * weight.element_size() for weight in network.parameters()),
        "cache_and_workspace_bytes": decoder.num_bytes,
    }


def main(names: list[str]) -> None:
    for name in names:
        network = draw(name)
        for batch, bits in CASES:
            print(json.dumps({"model": name, "batch": batch, "bits": bits} | measure(network, batch, bits)), flush=True)
        del network
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:] or ["llama-3.2-1b", "llama-3-8b"])
