"""Hugging Face transformers as an engine: a greedy loop with its DynamicCache, on a folder that Clearhead wrote.

engine = HuggingFaceEngine(target, "bfloat16")
"""

from collections.abc import Sequence
from typing import Any

import torch

from clearhead.benchmark.inference_engine import InferenceEngine, OnToken
from clearhead.benchmark.memory_traffic import weight_bytes_read
from clearhead.benchmark.target import BenchmarkTarget, import_transformers
from clearhead.errors import ClearheadError
from clearhead.files import read_json_object

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class HuggingFaceEngine(InferenceEngine):
    """A model of transformers in float32 or bfloat16."""

    name = "huggingface"

    def __init__(self, target: BenchmarkTarget, weights: str):
        self.transformers = import_transformers()
        self.network = load_in_transformers(target, weights)
        self.weights, self.device = weights, target.device
        self.cache_element_bytes = DTYPES[weights].itemsize
        target_element_bytes = next(target.network.parameters()).element_size()
        self.weight_bytes = weight_bytes_read(target.network) // target_element_bytes * self.cache_element_bytes

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], num_tokens: int, on_token: OnToken) -> None:
        cache = self.transformers.DynamicCache(config=self.network.config)
        tokens = torch.tensor([list(prompt)], device=self.device)
        for _ in range(num_tokens):
            output = self.network(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens = output.logits[:, -1].argmax(dim=-1, keepdim=True)
            on_token(tokens.item())


def load_in_transformers(target: BenchmarkTarget, weights: str) -> Any:
    """Return the target as a model of transformers."""
    network = find_class(target).from_pretrained(target.huggingface_folder(), dtype=DTYPES[weights])
    return network.to(target.device).eval().requires_grad_(False)


def find_class(target: BenchmarkTarget) -> Any:
    """Return the class of transformers for the target. Raise ClearheadError if there is none."""
    (class_name,) = read_json_object(target.huggingface_folder() / "config.json")["architectures"]
    transformers = import_transformers()
    if not hasattr(transformers, class_name):
        raise ClearheadError(f"the installed version of transformers has no {class_name}")
    return getattr(transformers, class_name)
