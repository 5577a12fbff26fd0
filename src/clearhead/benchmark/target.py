"""The model to measure, and the files that engines load it from.

target = BenchmarkTarget(load("smollm2", dtype="float32"), resolve_path("smollm2"), capacity=300, folder=temporary)
"""

import importlib
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from types import ModuleType

import torch

from clearhead.api import Model
from clearhead.architecture import LearnedPositions, ModelConfig
from clearhead.checkpoint import CONFIG_FILE, save_folder
from clearhead.errors import ClearheadError
from clearhead.model import Transformer

TEXT = (
    "A ship left the harbour before the sun was up. Nobody stood on the pier but the keeper of the lighthouse, who "
    "counted the lamps on deck and wrote the number in his book. The wind came from the north that week, cold and "
    "steady, and the gulls kept close to the rocks. "
)


@dataclass(frozen=True)
class BenchmarkTarget:
    """A model and what engines need to load it."""

    model: Model  # in the widest dtype that is measured; engines copy it
    path: Path | None  # its file or folder; None: it has random weights
    capacity: int  # the maximum number of tokens of a sequence
    folder: Path  # for files written for other engines

    @property
    def network(self) -> Transformer:
        """The network of the model."""
        return self.model.network

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return self.network.device

    @property
    def num_threads(self) -> int:
        """The number of CPU threads that every engine uses."""
        return torch.get_num_threads()

    def check(self) -> None:
        """Raise ClearheadError if the model has an encoder, or too few learned positions for the capacity."""
        config = self.model.config
        if config.decoder is None or config.encoder is not None:
            raise ClearheadError("bench needs a decoder-only model; this model has an encoder")
        positions = config.decoder.token_embedding.positions
        if isinstance(positions, LearnedPositions) and self.capacity > positions.num_positions:
            raise ClearheadError(
                f"the prompt and the new tokens have {self.capacity} tokens together; this model reads at most "
                f"{positions.num_positions}, so use fewer"
            )

    def prompt(self, length: int) -> list[int]:
        """Return a text of this many tokens, or random ids if the model has no tokenizer."""
        if self.model.tokenizer is None:
            generator = torch.Generator().manual_seed(0)
            return torch.randint(self.model.config.vocab_size, (length,), generator=generator).tolist()
        first, *others = self.model.encode(TEXT)  # the first may be the beginning-of-text token
        return list(islice(chain([first], cycle(others)), length))

    def gguf_file(self) -> Path:
        """Return the .gguf file of the model. Raise ClearheadError if there is none."""
        if self.path is None or self.path.suffix != ".gguf":
            raise ClearheadError("it needs a .gguf file, but this model has another format")
        return self.path

    def huggingface_folder(self) -> Path:
        """Return a folder that transformers can load; it is written on first use."""
        folder = self.folder / "huggingface"
        if not (folder / CONFIG_FILE).is_file():
            save_folder(self.network, folder, self.model.family, self.model.special_ids)
        return folder


@torch.no_grad()
def create_random_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Model:
    """Return a model with random weights that are drawn on the device: 8 billion take a second on a GPU."""
    with torch.device("meta"):
        network = Transformer(config)
    network = network.to(dtype).to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(0)
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.ndim > 1:
            tensor.normal_(std=0.02, generator=generator)  # the initialization of GPT-2
        else:
            tensor.fill_(1)
    return Model(network)


def import_transformers() -> ModuleType:
    """Import transformers without its progress bars, which would interrupt ours."""
    package = import_package("transformers", "transformers")
    package.utils.logging.disable_progress_bar()
    return package


def import_package(module: str, package: str) -> ModuleType:
    """Import an optional module. Raise ClearheadError with the package to install if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ClearheadError(f"it is not installed; run: pip install {package}") from None
