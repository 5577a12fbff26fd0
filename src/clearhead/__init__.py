"""Clearhead: every Transformer works, in the clear.

    import clearhead
    model = clearhead.load("smollm2")
    print(model.generate("The capital of France is", max_new_tokens=8))

Names are brought in when first used, so that `clearhead --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clearhead.api import Model, create, load
    from clearhead.architecture import ModelConfig
    from clearhead.catalog import get
    from clearhead.config import from_json, from_toml, to_json, to_toml
    from clearhead.costs import cost
    from clearhead.errors import ClearheadError
    from clearhead.families import preset, presets
    from clearhead.generation import Generation
    from clearhead.inspection import Trace
    from clearhead.model import Transformer
    from clearhead.summary import summarize

HOMES = {
    "ClearheadError": "errors",
    "Generation": "generation",
    "Model": "api",
    "ModelConfig": "architecture",
    "Trace": "inspection",
    "Transformer": "model",
    "cost": "costs",
    "create": "api",
    "from_json": "config",
    "from_toml": "config",
    "get": "catalog",
    "load": "api",
    "preset": "families",
    "presets": "families",
    "summarize": "summary",
    "to_json": "config",
    "to_toml": "config",
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
    "from_json",
    "from_toml",
    "get",
    "load",
    "preset",
    "presets",
    "summarize",
    "to_json",
    "to_toml",
]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'clearhead' has no attribute {name!r}")
    return getattr(import_module(f"clearhead.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
