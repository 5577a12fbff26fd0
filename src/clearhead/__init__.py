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

from typing import TYPE_CHECKING, Any

from clearhead.lazy_imports import lazy_exports
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

_import_name = lazy_exports(
    __name__,
    {
        "api": ["Model", "cost", "create", "from_huggingface", "load", "summarize"],
        "architecture": ["ModelConfig"],
        "catalog": ["get"],
        "config": ["from_json", "from_toml", "to_json", "to_toml"],
        "errors": ["ClearheadError"],
        "families": ["preset", "presets"],
        "generation": ["Generation"],
        "inspection": ["Trace"],
        "model": ["Transformer"],
        "threads": ["set_threads"],
        "training": ["train"],
    },
)


def __getattr__(name: str) -> Any:
    if name == "__version__":  # pyproject.toml is the only place that states it
        from importlib.metadata import version

        return version("clearhead")
    return _import_name(name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
