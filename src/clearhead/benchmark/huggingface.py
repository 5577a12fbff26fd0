"""transformers as a peer: its model from a folder that we wrote, a greedy loop with its DynamicCache.

engine = HuggingFace(subject, "bfloat16")
"""

from collections.abc import Sequence

import torch

from clearhead.benchmark.engine import Engine, Hear
from clearhead.benchmark.subject import Subject, transformers_package
from clearhead.benchmark.traffic import weights_read
from clearhead.errors import ClearheadError
from clearhead.files import read_object

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class HuggingFace(Engine):
    name = "huggingface"

    def __init__(self, subject: Subject, weights: str):
        self.transformers = transformers_package()
        folder = subject.huggingface_folder()
        (kind,) = read_object(folder / "config.json")["architectures"]
        if not hasattr(self.transformers, kind):
            raise ClearheadError(f"the transformers installed here has no {kind}")
        network = getattr(self.transformers, kind).from_pretrained(folder, dtype=DTYPES[weights])
        self.network = network.to(subject.device).eval().requires_grad_(False)
        self.weights, self.device = weights, subject.device
        self.cache_element_bytes = DTYPES[weights].itemsize
        own_bytes = next(subject.network.parameters()).element_size()
        self.weight_bytes = weights_read(subject.network) // own_bytes * self.cache_element_bytes

    @torch.inference_mode()
    def speak(self, prompt: Sequence[int], num_tokens: int, hear: Hear) -> None:
        cache = self.transformers.DynamicCache(config=self.network.config)
        tokens = torch.tensor([list(prompt)], device=self.device)
        for _ in range(num_tokens):
            found = self.network(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens = found.logits[:, -1].argmax(dim=-1, keepdim=True)
            hear(tokens.item())
