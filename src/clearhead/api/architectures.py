"""Functions about an architecture that also take the name of a model, and those for recurrent networks.

    clearhead.cost("llama-3.1-8b", phase="decode", context=8192, device="h200")

`costs` and `summary` compute from a ModelConfig; here a name becomes one first.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from clearhead import costs, summary
from clearhead.architecture import ModelConfig
from clearhead.checkpoint import read_config, read_recurrent_config
from clearhead.config import to_dict
from clearhead.families import preset, presets
from clearhead.model import RecurrentTranslator

P = ParamSpec("P")
R = TypeVar("R")


def find_config(model: str | Path) -> ModelConfig:
    """Return the architecture of a preset, an installed model, a model folder, a .gguf file or a Hub id."""
    is_preset = isinstance(model, str) and model in presets() and not Path(model).exists()
    return preset(str(model)) if is_preset else read_config(model)


def summarize_recurrent(folder: str | Path) -> dict[str, Any]:
    """Return the config of a recurrent network in a folder and the number of parameters in each part, as JSON data."""
    config = read_recurrent_config(folder)
    with torch.device("meta"):  # no memory, whatever the sizes are
        network = RecurrentTranslator(config)
    counts = {name: sum(each.numel() for each in part.parameters()) for name, part in network.named_children()}
    parts = {name.replace("_", " "): count for name, count in counts.items() if count}
    return {"kind": "recurrent", "parameters": sum(parts.values()), "parts": parts, "config": to_dict(config)}


def recurrent_cost(
    folder: str | Path, *, batch: int = 1, target: int | None = None, source: int | None = None
) -> dict[str, Any]:
    """Return parameters, FLOPs of a forward pass and sequential steps of a recurrent network, as JSON data.

    target, source: numbers of tokens per sequence; by default the model's context, and `target`.
    """
    config = read_recurrent_config(folder)
    target = config.context if target is None else target
    source = target if source is None else source
    parts = costs.recurrent_flops(config, source=source, target=target, batch=batch)
    sizes = {"batch": batch, "source": source, "target": target, "sequential_steps": source + target}
    counts = {"parameters": summarize_recurrent(folder)["parameters"], "flops": sum(parts.values())}
    return {"kind": "recurrent", **sizes, **counts, "flops_by_part": parts}


def _accept_names(function: Callable[Concatenate[ModelConfig, P], R]) -> Callable[Concatenate[ModelConfig | str, P], R]:
    """Return a function of a config that also takes the name of a model, with the same help."""

    @wraps(function)
    def call(config: ModelConfig | str, *arguments: P.args, **options: P.kwargs) -> R:
        return function(find_config(config) if isinstance(config, (str, Path)) else config, *arguments, **options)

    signature = inspect.signature(function)
    first, *others = signature.parameters.values()
    parameters = [first.replace(annotation=ModelConfig | str), *others]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # shown by help()
    return call  # type: ignore[return-value]  # Concatenate has no name for its parameter; this one does


cost = _accept_names(costs.cost)
summarize = _accept_names(summary.summarize)
