"""Clearhead in each weight format: the decoding loop in C++ kernels, or on an NVIDIA GPU in one CUDA graph.

    engine = open_clearhead(target, "int4")

If the kernels do not support a model, PyTorch's modules run, and the engine's note gives the reason.
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
    unsupported_network_reason,
)
from clearhead.benchmark.inference_engine import InferenceEngine, OnToken
from clearhead.benchmark.memory_traffic import weight_bytes_read
from clearhead.benchmark.target import BenchmarkTarget
from clearhead.errors import ClearheadError
from clearhead.generation import TokenSequence, decode
from clearhead.model import Transformer
from clearhead.options import SamplingOptions

DTYPES = {"float32": torch.float32}  # all other formats compute, and keep their cache, in bfloat16


def open_clearhead(target: BenchmarkTarget, weights: str) -> InferenceEngine:
    """Return an engine with the fastest decoding that supports the model."""
    network = copy_network(target, weights)
    if target.device.type == "cuda" and unsupported_network_reason(network, "cuda") is None:
        return CudaGraphEngine(network, weights, target.capacity)
    return _LoopEngine(network, weights, accelerate_or_explain(network))


def copy_network(target: BenchmarkTarget, weights: str) -> Transformer:
    """Return a copy of the target's network in a weight format."""
    if weights == "stored":
        return load(target.gguf_file(), device=target.device, weights="stored", fast=False).network
    network = deepcopy(target.network).to(DTYPES.get(weights, torch.bfloat16)).requires_grad_(False)
    return pack_network(network, cast(Bits, weights)) if weights in ("int8", "int4") else network


def accelerate_or_explain(network: Transformer) -> str | None:
    """Let the network decode in the C++ kernels, in place; return a note if it does not."""
    if network.device.type == "cuda":
        reason = unsupported_network_reason(network, "cuda")
    else:
        try:
            reason = None if accelerate(network) else unsupported_network_reason(network, "cpu")
        except ClearheadError as error:  # there is no compiler
            reason = str(error)
    return None if reason is None else f"runs in PyTorch's modules: {reason}"


class _LoopEngine(InferenceEngine):
    """The decoding loop of the generation package."""

    name = "clearhead"

    def __init__(self, network: Transformer, weights: str, note: str | None = None):
        self.network, self.weights, self.note = network, weights, note
        self.weight_bytes = weight_bytes_read(network)
        self.cache_element_bytes = next(network.parameters()).element_size()

    def generate(self, prompt: Sequence[int], num_tokens: int, on_token: OnToken) -> None:
        sequence = TokenSequence(prompt, SamplingOptions(max_new_tokens=num_tokens))
        for _ in decode(self.network, [sequence]):
            on_token(sequence.tokens[-1])


class CudaGraphEngine(InferenceEngine):
    """Decoding steps in one CUDA graph, which is captured in the first call and reused in the others."""

    name = "clearhead"

    def __init__(self, network: Transformer, weights: str, capacity: int):
        self.weights, self.weight_bytes = weights, weight_bytes_read(network)
        self.cache_element_bytes = next(network.parameters()).element_size()
        self.decoder = GraphDecoder(network, 1, capacity + 1, lambda logits, steps: logits.argmax(dim=-1))

    def generate(self, prompt: Sequence[int], num_tokens: int, on_token: OnToken) -> None:
        token = self.decoder.prefill([prompt]).argmax(dim=-1)
        on_token(int(token))
        if num_tokens == 1:
            return
        self.decoder.start(token)
        pending = AsyncTokens(self.decoder.replay_step())
        for _ in range(num_tokens - 2):
            following = AsyncTokens(
                self.decoder.replay_step()
            )  # the GPU computes it while the host waits for `pending`
            on_token(*pending.result())
            pending = following
        on_token(*pending.result())
