"""The model that is measured, and what all engines are made from.

subject = Subject(load("smollm2", dtype="float32"), locate("smollm2", ()), capacity=300, folder=temporary_folder)
"""

import importlib
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from types import ModuleType

import torch

from clearhead.api import Model
from clearhead.architecture import LearnedPositions, ModelConfig
from clearhead.checkpoint import CONFIG, save_folder
from clearhead.errors import ClearheadError
from clearhead.model import Transformer

TEXT = (
    "A ship left the harbour before the sun was up. Nobody stood on the pier but the keeper of the lighthouse, who "
    "counted the lamps on deck and wrote the number in his book. The wind came from the north that week, cold and "
    "steady, and the gulls kept close to the rocks. "
)


@dataclass(frozen=True)
class Subject:
    model: Model  # in the widest precision that is measured; engines take copies
    path: Path | None  # of its file or folder; None: its weights were drawn at random
    capacity: int  # the most tokens a text will have
    folder: Path  # for what peers need written

    @property
    def network(self) -> Transformer:
        return self.model.network

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def num_threads(self) -> int:
        """Every engine gets as many."""
        return torch.get_num_threads()

    def check(self) -> None:
        config = self.model.config
        if config.decoder is None or config.encoder is not None:
            raise ClearheadError("bench measures decoders alone; this model has an encoder")
        positions = config.decoder.embedding.positions
        if isinstance(positions, LearnedPositions) and self.capacity > positions.num_positions:
            raise ClearheadError(
                f"prompt and tokens together are {self.capacity}; this model ends at {positions.num_positions}"
            )

    def prompt(self, length: int) -> list[int]:
        """A text of so many tokens; any numbers, where the model knows no text."""
        if self.model.tokenizer is None:
            generator = torch.Generator().manual_seed(0)
            return torch.randint(self.model.config.vocab_size, (length,), generator=generator).tolist()
        first, *others = self.model.encode(TEXT)  # the first may stand for the beginning of a text
        return list(islice(chain([first], cycle(others)), length))

    def gguf_file(self) -> Path:
        if self.path is None or self.path.suffix != ".gguf":
            raise ClearheadError("it needs a .gguf file, and this model is none")
        return self.path

    def huggingface_folder(self) -> Path:
        """The model as transformers reads it, written when first asked for."""
        folder = self.folder / "huggingface"
        if not (folder / CONFIG).is_file():
            save_folder(self.network, folder, self.model.family, self.model.special_ids)
        return folder


@torch.no_grad()
def draw(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Model:
    """A model at random weights, made on the device itself: 8 billion of them take a second on a GPU."""
    with torch.device("meta"):
        network = Transformer(config)
    network = network.to(dtype).to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(0)
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.ndim > 1:
            tensor.normal_(std=0.02, generator=generator)  # as GPT-2 begins
        else:
            tensor.fill_(1)
    return Model(network)


def transformers_package() -> ModuleType:
    """Without its bars, which would stand between ours."""
    package = import_peer("transformers", "transformers")
    package.utils.logging.disable_progress_bar()
    return package


def import_peer(module: str, package: str) -> ModuleType:
    """An optional package, or one sentence that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ClearheadError(f"it is not installed; pip install {package}") from None
