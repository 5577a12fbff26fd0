"""The interface of all checkpoint loaders: LoadOptions in, ModelParts out.

loaded = load_folder(path, LoadOptions(dtype=torch.bfloat16)); loaded.network, loaded.tokenizer
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from clearhead.backends import Bits
from clearhead.checkpoint.labels import Labels
from clearhead.checkpoint.speech import SpeechSettings
from clearhead.families import Family
from clearhead.model import SentencePooler, Transformer
from clearhead.tokenization import Tokenizer

Progress = Callable[[str, int, int], None]
"""Called as progress(tensor_name, num_done, num_total) after each tensor."""

Weights = Literal["full", "stored", "int8", "int4"]
"""full: numbers. stored: the quantized blocks of a GGUF file. int8, int4: quantized while loading."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How the weights of a checkpoint are placed in memory."""

    dtype: torch.dtype | None = None  # None: as stored
    device: torch.device | str | None = None  # None: PyTorch's default
    weights: Weights = "full"
    progress: Progress | None = None  # reports how many tensors have been placed

    @property
    def bits(self) -> Bits | None:
        """The format to quantize to, if any."""
        return self.weights if self.weights in ("int8", "int4") else None


DEFAULT_OPTIONS = LoadOptions()


@dataclass(frozen=True, eq=False)
class ModelParts:
    """The parts of a model that a checkpoint contains."""

    network: Transformer
    tokenizer: Tokenizer | None = None
    family: Family | None = None
    special_ids: dict[str, Any] = field(default_factory=dict)  # keys are those of transformers, such as "eos_token_id"
    sentence: SentencePooler | None = None  # how to embed texts; None: the mean of the hidden states
    labels: Labels | None = None  # of a model that classifies
    folder: Path | None = None  # the Hugging Face folder whose weights the network has
    speech: SpeechSettings | None = None  # what the tokens of a speech model mean; None: what their names say
