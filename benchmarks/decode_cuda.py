"""Decoding in a CUDA graph: tokens per second and peak memory, one row and many, in bfloat16, int8 and four bits.

    python benchmarks/decode_cuda.py llama-3.2-1b llama-3-8b

Random weights of the named shape: the speed does not depend on them. One JSON line for each measurement; `stated_bytes`
are the weights, the cache, the kernels' workspace and the largest matrix, of which a second copy exists for as long as
its parts are merged.
"""

import json
import statistics
import sys
import time

import torch

from clearhead.benchmark.traffic import weights_held
from clearhead.families import preset
from clearhead.fast.cuda import GraphDecoder
from clearhead.fast.modules import pack_network
from clearhead.fast.packed import Bits
from clearhead.model.transformer import Transformer

PROMPT, CAPACITY, NUM_TOKENS, ROUNDS = 128, 512, 100, 5
CASES: tuple[tuple[int, Bits | None], ...] = ((1, None), (64, None), (1, "int8"), (1, "int4"))  # rows, bits


def draw(name: str) -> Transformer:
    torch.manual_seed(0)
    with torch.device("meta"):
        network = Transformer(preset(name)).to(torch.bfloat16)
    network = network.to_empty(device="cuda").eval().requires_grad_(False)
    for weight in network.parameters():
        weight.normal_(std=0.02) if weight.ndim > 1 else weight.fill_(1)
    return network


def measure(network: Transformer, batch: int) -> dict[str, float]:
    weight_bytes = weights_held(network)
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
    largest = max(matrix.num_bytes for layer in decoder.layers for matrix in layer.matrices)
    return {
        "tokens_per_second": batch / statistics.median(seconds),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "stated_bytes": weight_bytes + decoder.num_bytes + largest,
    }


def main(names: list[str]) -> None:
    for name in names:
        for batch, bits in CASES:
            network = draw(name) if bits is None else pack_network(draw(name), bits)
            torch.cuda.empty_cache()
            print(json.dumps({"model": name, "batch": batch, "bits": bits} | measure(network, batch)), flush=True)
            del network


if __name__ == "__main__":
    main(sys.argv[1:] or ["llama-3.2-1b", "llama-3-8b"])
