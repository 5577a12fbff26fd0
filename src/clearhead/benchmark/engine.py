"""What is measured: anything that continues a prompt greedily and says each token as soon as it knows it.

    engine.speak(prompt_ids, num_tokens=16, hear=tokens.append)

No engine stops early: a token that ends texts is a token like any other here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

WEIGHTS = ("float32", "bfloat16", "int8", "int4", "stored")  # stored: as the blocks of a .gguf file

Hear = Callable[[int], object]


class Engine(ABC):
    name: ClassVar[str]
    weights: str  # of WEIGHTS
    weight_bytes: int  # read for every token
    cache_element_bytes: int  # of one number in its cache
    remark: str | None = None  # what a reader of its numbers should know

    @abstractmethod
    def speak(self, prompt: Sequence[int], num_tokens: int, hear: Hear) -> None:
        """Tell `hear` the likeliest `num_tokens` after the prompt, one by one; nothing is kept for the next call."""

    def __str__(self) -> str:
        return f"{self.name} {self.weights}"
