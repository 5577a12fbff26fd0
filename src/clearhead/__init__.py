"""Clearhead: load, run, train and look inside Transformer models.

    import clearhead
    model = clearhead.load("smollm2")
    print(model.generate("The capital of France is", max_new_tokens=8))

load, create              load a model from a checkpoint, or create one with random weights
from_huggingface          a model from a module of transformers in memory; Model.to_huggingface goes back
Model                     a network with its tokenizer: generate, generate_many, ask, stream, chat, score, embed,
                          classify, rerank, trace, engine, save
Generation, Trace         what Model.generate and Model.trace return
get                       download a model or data set by name
train                     train a model from a recipe
preset, presets           the architecture of a released model by name; all names
ModelConfig, Transformer  an architecture as data, and the network that it describes
summarize, cost           an architecture as a table; what it costs in FLOPs, bytes, memory and time
set_threads               how many CPU threads compute
to_json, from_json, to_toml, from_toml    a config as text, and back
ClearheadError            the error raised for invalid input

Names are imported on first use, so that `clearhead --help` does not wait for torch. If torch has not been imported yet,
its threads are told to sleep soon when they wait (clearhead/threads.py).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from clearhead.threads import shorten_spinning

if TYPE_CHECKING:
    from clearhead.api import Model, cost, create, from_huggingface, load, summarize
    from clearhead.architecture import ModelConfig
    from clearhead.catalog import get
    from clearhead.config import from_json, from_toml, to_json, to_toml
    from clearhead.errors import ClearheadError
    from clearhead.families import preset, presets
    from clearhead.generation import Generation
    from clearhead.inspection import Trace
    from clearhead.model import Transformer
    from clearhead.threads import set_threads
    from clearhead.training import train

    __version__: str

shorten_spinning()

MODULES = {  # the module that defines each public name
    "ClearheadError": "errors",
    "Generation": "generation",
    "Model": "api",
    "ModelConfig": "architecture",
    "Trace": "inspection",
    "Transformer": "model",
    "cost": "api",
    "create": "api",
    "from_huggingface": "api",
    "from_json": "config",
    "from_toml": "config",
    "get": "catalog",
    "load": "api",
    "preset": "families",
    "presets": "families",
    "set_threads": "threads",
    "summarize": "api",
    "to_json": "config",
    "to_toml": "config",
    "train": "training",
}

__all__ = [
    "ClearheadError",
    "Generation",
    "Model",
    "ModelConfig",
    "Trace",
    "Transformer",
    "cost",
    "create",
    "from_huggingface",
    "from_json",
    "from_toml",
    "get",
    "load",
    "preset",
    "presets",
    "set_threads",
    "summarize",
    "to_json",
    "to_toml",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":  # pyproject.toml is the only place that states it
        from importlib.metadata import version

        return version("clearhead")
    if name not in MODULES:
        raise AttributeError(f"module 'clearhead' has no attribute {name!r}")
    return getattr(import_module(f"clearhead.{MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
