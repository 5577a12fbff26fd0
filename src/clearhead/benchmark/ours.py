"""Clearhead itself, in each weight format: the decode loop with its step in kernels, on an NVIDIA GPU in one graph.

    engine = open_ours(subject, "int4")

Where the fast step does not know a model, the network's own modules run, and the engine's remark says why.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import cast

import torch

from clearhead.api import load
from clearhead.backends import (
    AsyncTokens,
    Bits,
    GraphDecoder,
    accelerate,
    pack_network,
    why_no_cpu_kernels,
    why_no_cuda_graph,
)
from clearhead.benchmark.engine import Engine, Hear
from clearhead.benchmark.subject import Subject
from clearhead.benchmark.traffic import weights_read
from clearhead.errors import ClearheadError
from clearhead.generation import TokenSequence, decode
from clearhead.model import Transformer
from clearhead.options import SamplingOptions

DTYPES = {"float32": torch.float32}  # what is packed computes, and keeps its cache, in bfloat16


def open_ours(subject: Subject, weights: str) -> Engine:
    if weights == "stored":
        network = load(subject.gguf_file(), device=subject.device, weights="stored", fast=False).network
    else:
        network = deepcopy(subject.network).to(DTYPES.get(weights, torch.bfloat16)).requires_grad_(False)
        if weights in ("int8", "int4"):
            pack_network(network, cast(Bits, weights))
    if subject.device.type == "cuda" and why_no_cuda_graph(network) is None:
        return Graph(network, weights, subject.capacity)
    return Loop(network, weights, why_slow(network))


def why_slow(network: Transformer) -> str | None:
    """Let the step run in kernels, in place; a sentence where it does not."""
    if network.device.type == "cuda":
        reason = why_no_cuda_graph(network)
    else:
        try:
            reason = None if accelerate(network) else why_no_cpu_kernels(network)
        except ClearheadError as error:  # no compiler
            reason = str(error)
    return None if reason is None else f"runs in PyTorch's modules: {reason}"


class Loop(Engine):
    """The readable loop of generation/decode.py."""

    name = "clearhead"

    def __init__(self, network: Transformer, weights: str, remark: str | None = None):
        self.network, self.weights, self.remark = network, weights, remark
        self.weight_bytes = weights_read(network)
        self.cache_element_bytes = next(network.parameters()).element_size()

    def speak(self, prompt: Sequence[int], num_tokens: int, hear: Hear) -> None:
        row = TokenSequence(prompt, SamplingOptions(max_new_tokens=num_tokens))
        for _ in decode(self.network, [row]):
            hear(row.tokens[-1])


class Graph(Engine):
    """The step as one CUDA graph, captured in the first call and kept for the others."""

    name = "clearhead"

    def __init__(self, network: Transformer, weights: str, capacity: int):
        self.weights, self.weight_bytes = weights, weights_read(network)
        self.cache_element_bytes = next(network.parameters()).element_size()
        self.decoder = GraphDecoder(network, 1, capacity + 1, lambda logits, steps: logits.argmax(dim=-1))

    def speak(self, prompt: Sequence[int], num_tokens: int, hear: Hear) -> None:
        token = self.decoder.read([prompt]).argmax(dim=-1)
        hear(int(token))
        if num_tokens == 1:
            return
        self.decoder.start(token)
        pending = AsyncTokens(self.decoder.next())
        for _ in range(num_tokens - 2):
            coming = AsyncTokens(self.decoder.next())  # the GPU works on it while the host waits for the one before
            hear(*pending.read())
            pending = coming
        hear(*pending.read())
