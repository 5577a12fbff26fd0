"""Measure decoding in a CUDA graph: tokens per second and peak memory, for one and many sequences and packed weights.

    python benchmarks/decode_cuda.py llama-3.2-1b llama-3-8b

The weights are random, since the speed does not depend on them. Every measurement runs in its own process and prints
one JSON line, with the measured and the predicted peak memory of prefill and of decoding. The prediction is the sum of
weights, cache, the workspaces of the kernels and of cuBLAS, and temporary buffers:

- prefill: the larger of one merged weight matrix, and the activations of the cost model with the largest unpacked
  matrix
- decoding: the logits in bfloat16 and in float32
"""

import itertools
import json
import math
import multiprocessing
import statistics
import sys
import time

import torch

from clearhead.backends import ELEMENTS_PER_CHUNK, Bits, GraphDecoder, PackedLinear, pack_network
from clearhead.benchmark import total_weight_bytes
from clearhead.costs import Workload, estimate_memory
from clearhead.families import preset
from clearhead.model import Transformer

PROMPT, CAPACITY, NUM_TOKENS, ROUNDS = 128, 512, 100, 5
CASES: tuple[tuple[int, Bits | None], ...] = ((1, None), (64, None), (1, "int8"), (1, "int4"))  # sequences, bits
CUBLAS_BYTES = 1 << 25  # workspace of cuBLAS per stream in PyTorch on Hopper


def random_network(name: str) -> Transformer:
    torch.manual_seed(0)
    with torch.device("meta"):
        network = Transformer(preset(name)).to(torch.bfloat16)
    network = network.to_empty(device="cuda").eval().requires_grad_(False)
    for weight in network.parameters():
        weight.normal_(std=0.02) if weight.ndim > 1 else weight.fill_(1)
    return network


def measure(network: Transformer, batch: int) -> dict[str, float]:
    weight_bytes = total_weight_bytes(network)
    torch.cuda.reset_peak_memory_stats()
    decoder = GraphDecoder(network, batch, CAPACITY, lambda logits, steps: logits.argmax(-1))
    first = decoder.prefill(torch.randint(0, 1000, (batch, PROMPT)).tolist()).argmax(-1)
    prefill_peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    decoder.start(first)
    seconds = []
    for _ in range(ROUNDS):
        decoder.position.fill_(PROMPT)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(NUM_TOKENS):
            decoder.replay_step()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / NUM_TOKENS)
    permanent_bytes = weight_bytes + decoder.num_bytes
    num_streams = 1 if batch <= decoder.max_kernel_rows else 3  # prefill; warm-up and graph have their own
    return {
        "tokens_per_second": batch / statistics.median(seconds),
        "prefill_peak_bytes": prefill_peak,
        "predicted_prefill_peak_bytes": permanent_bytes + temporary_prefill_bytes(decoder, batch),
        "decoding_peak_bytes": torch.cuda.max_memory_allocated(),
        "predicted_decoding_peak_bytes": permanent_bytes
        + batch * network.config.vocab_size * (2 + 4)
        + num_streams * CUBLAS_BYTES,
    }


def temporary_prefill_bytes(decoder: GraphDecoder, batch: int) -> int:
    """Return the predicted bytes of temporary buffers while the prompts are read."""
    merging = max(projection.num_bytes for layer in decoder.layers for projection in layer.block.projections)
    network = decoder.network
    workload = Workload(
        config=network.config, phase="prefill", batch=batch, context=PROMPT, source=PROMPT, device_type="cuda"
    )
    prefill = estimate_memory(workload)
    packed = [module.packed for module in network.modules() if isinstance(module, PackedLinear)]
    unpacked = max((2 * math.prod(matrix.shape) for matrix in packed), default=0)
    unpacked += 2 * 4 * ELEMENTS_PER_CHUNK if packed else 0
    return max(merging, prefill.peak - prefill.weights - prefill.cache + unpacked + CUBLAS_BYTES)


def case(name: str, batch: int, bits: Bits | None) -> dict[str, float]:
    network = random_network(name) if bits is None else pack_network(random_network(name), bits)
    torch.cuda.empty_cache()
    return measure(network, batch)


def main(names: list[str]) -> None:
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name, (batch, bits) in itertools.product(names, CASES):
            result = pool.apply(case, (name, batch, bits))
            print(json.dumps({"model": name, "batch": batch, "bits": bits} | result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["llama-3.2-1b", "llama-3-8b"])
