"""The interface of what is measured: anything that continues a prompt greedily and reports each token at once.

    engine.generate(prompt_ids, num_tokens=16, on_token=tokens.append)

No engine stops early: end tokens are treated like any other token.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

WEIGHTS = ("float32", "bfloat16", "int8", "int4", "stored")  # stored: the blocks of a .gguf file

OnToken = Callable[[int], object]


class InferenceEngine(ABC):
    """An engine that is ready to generate with one model in one weight format."""

    name: ClassVar[str]
    weights: str  # one of WEIGHTS
    weight_bytes: int  # read for every token
    cache_element_bytes: int  # of one number in its cache
    note: str | None = None  # what a reader of its numbers should know

    @abstractmethod
    def generate(self, prompt: Sequence[int], num_tokens: int, on_token: OnToken) -> None:
        """Call `on_token` with each of `num_tokens` greedy tokens after the prompt; keep nothing for later calls."""

    def __str__(self) -> str:
        return f"{self.name} {self.weights}"
