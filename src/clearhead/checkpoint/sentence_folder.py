"""Read and write the files that the sentence-transformers library adds to a model folder.

pooler = load_sentence_pooler(folder, width, options, dtype)   # None: the folder has no modules.json

modules.json                        the modules in order: Transformer, Pooling, then Dense, LayerNorm or Normalize
1_Pooling/config.json               the pooling modes
2_Dense/config.json, *.safetensors  a linear layer and its activation
sentence_bert_config.json           max_seq_length, do_lower_case
config_sentence_transformers.json   prompts, truncate_dim
"""

import json
import re
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead.architecture import Normalize, Pooling, Projection, SentenceConfig, SentenceStep, VectorNorm
from clearhead.checkpoint.interface import LoadOptions
from clearhead.checkpoint.tensors import open_safetensors
from clearhead.errors import ClearheadError, quote
from clearhead.families import Settings
from clearhead.files import read_json, read_json_object, write_text
from clearhead.model import SentencePooler
from clearhead.tensor_files import write_safetensors

MODULES_FILE = "modules.json"
_PROMPTS_FILE, _TEXT_FILE = "config_sentence_transformers.json", "sentence_bert_config.json"
_OLD_TEXT_FILES = [
    f"sentence_{name}_config.json" for name in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
_PACKAGE = "sentence_transformers.models"
_MODE_SETTINGS = {  # setting of 1_Pooling/config.json -> our mode
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
_MODE_NAMES = {"mean_sqrt_len_tokens": "mean_sqrt_len", "weightedmean": "weighted_mean", "lasttoken": "last"}
_ActivationName = Literal["identity", "tanh", "relu", "gelu", "silu", "sigmoid"]
_ACTIVATIONS: dict[str, _ActivationName] = {  # class of torch.nn -> our name
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}


def network_folder(folder: Path) -> Path:
    """Return the folder of config.json and the weights: a subfolder in old sentence-transformers folders."""
    if (folder / "config.json").is_file() or not (folder / MODULES_FILE).is_file():
        return folder
    return folder / next((path for kind, path in _read_modules(folder) if kind == "Transformer"), "")


def load_sentence_pooler(folder: Path, width: int, options: LoadOptions, dtype: torch.dtype) -> SentencePooler | None:
    """Return what follows a network of this width in a sentence-transformers folder, or None in any other folder."""
    if not (folder / MODULES_FILE).is_file():
        return None
    modules = _read_modules(folder)
    config, paths = _read_sentence_config(folder, modules, width)
    with torch.device("meta"):  # no memory before the files turn out to have these sizes
        pooler = SentencePooler(config)
    for step, path in zip(pooler.steps, paths, strict=True):
        if next(step.parameters(), None) is not None:
            _load_step(step, folder / path)
    return pooler.to(device=options.device, dtype=dtype).eval()


def _read_modules(folder: Path) -> list[tuple[str, str]]:
    """Return the class and the subfolder of each module."""
    where = str(folder / MODULES_FILE)
    entries = read_json(folder / MODULES_FILE)
    if not isinstance(entries, list):
        raise ClearheadError(f"{where} must hold a list of modules, not {type(entries).__name__}")
    modules = []
    for entry in entries:
        settings = Settings(entry, where)
        path = settings.string("path", "")
        if not re.fullmatch(r"[\w.-]{0,60}", path) or path.startswith("."):
            raise ClearheadError(f"{where}: the path {quote(path)} must name a subfolder of the model's folder")
        modules.append((settings.string("type").rpartition(".")[2], path))
    return modules


def _read_sentence_config(folder: Path, modules: list[tuple[str, str]], width: int) -> tuple[SentenceConfig, list[str]]:
    """Return the config, and the subfolder of each of its steps."""
    pooling, steps, paths, unsupported = None, list[SentenceStep](), list[str](), None
    for kind, path in modules:
        settings = Settings(read_json_object(folder / path / "config.json"), str(folder / path / "config.json"))
        if kind == "Pooling":
            pooling = _read_pooling(settings)
        elif step := _read_step(kind, settings):
            steps.append(step)
            paths.append(path)
        elif kind not in ("Transformer", "Dropout"):
            unsupported = f"the module {kind}"
    text = _read_text_settings(folder, next((path for kind, path in modules if kind == "Transformer"), ""))
    names = Settings(read_json_object(folder / _PROMPTS_FILE), str(folder / _PROMPTS_FILE))
    prompts = names.object("prompts")
    config = SentenceConfig(
        width=width,
        pooling=pooling or Pooling(),
        steps=tuple(steps),
        dimensions=names.integer("truncate_dim", at_least=1) if "truncate_dim" in names else None,
        max_tokens=text.integer("max_seq_length", at_least=1) if "max_seq_length" in text else None,
        lower_case=text.boolean("do_lower_case", False),
        prompts=tuple((name, prompts.string(name, "")) for name in prompts.data),
        default_prompt=names.string("default_prompt_name") if "default_prompt_name" in names else None,
        unsupported=unsupported or (None if pooling else "a folder without a Pooling module"),
    )
    return config, paths


def _read_text_settings(folder: Path, path: str) -> Settings:
    """Return max_seq_length and do_lower_case; without the first, the tokenizer's limit."""
    for name in (_TEXT_FILE, *_OLD_TEXT_FILES):
        file = folder / path / name
        if file.is_file():
            data = read_json_object(file)
            if data.get("max_seq_length") is not None:
                return Settings(data, str(file))
            break
    else:
        file, data = folder / path / _TEXT_FILE, {}
    limit = read_json_object(folder / path / "tokenizer_config.json").get("model_max_length")
    is_limit = isinstance(limit, int) and 0 < limit < 10**9  # transformers writes 10**30 for none
    return Settings(data | ({"max_seq_length": limit} if is_limit else {}), str(file))


def _read_pooling(settings: Settings) -> Pooling:
    if isinstance(settings.data.get("pooling_mode"), list):
        modes = [_MODE_NAMES.get(mode, mode) for mode in map(str, settings.array("pooling_mode"))]
    elif "pooling_mode" in settings:
        mode = settings.string("pooling_mode").lower()
        modes = [_MODE_NAMES.get(mode, mode)]
    else:
        modes = [mode for name, mode in _MODE_SETTINGS.items() if settings.boolean(name, mode == "mean")]
    return Pooling(modes=tuple(modes), include_prompt=settings.boolean("include_prompt", True))


def _read_step(kind: str, settings: Settings) -> SentenceStep | None:
    """Return a module that follows the pooling, or None if it is none that we know."""
    if kind == "Normalize":
        return Normalize()
    if kind == "LayerNorm":
        return VectorNorm(width=settings.integer("dimension", at_least=1))
    if kind != "Dense":
        return None
    name = settings.string("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise ClearheadError(f"{settings.where}: the activation {quote(name)} is not supported")
    return Projection(
        input_width=settings.integer("in_features", at_least=1),
        width=settings.integer("out_features", at_least=1),
        activation=_ACTIVATIONS[name],
        bias=settings.boolean("bias", True),
    )


def _load_step(step: nn.Module, folder: Path) -> None:
    """Fill in the weights of a module."""
    file = folder / "model.safetensors"
    if not file.is_file():
        raise ClearheadError(f"{folder} has no model.safetensors; save the model with safe_serialization=True first")
    tensors = open_safetensors([file], str(file))
    # The library stores the norm as `norm.weight`, and the linear layer of Dense as `linear.weight`.
    names = {name: name if "." in name else f"norm.{name}" for name in step.state_dict()}
    if set(tensors) != set(names.values()):
        raise ClearheadError(f"{file} holds {sorted(tensors)}; it must hold {sorted(names.values())}")
    values = {name: tensors[stored].float() for name, stored in names.items()}
    wrong = next((name for name, value in values.items() if value.shape != step.state_dict()[name].shape), None)
    if wrong is not None:
        raise ClearheadError(f"{file}: {names[wrong]} has another shape than its config.json says")
    step.load_state_dict(values, assign=True)


# --- saving


def save_sentence_pooler(pooler: SentencePooler | None, folder: Path) -> None:
    """Write the files of a pooler; without one, delete an old modules.json."""
    if pooler is None or pooler.config.unsupported is not None:
        (folder / MODULES_FILE).unlink(missing_ok=True)
        return
    config = pooler.config
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    modes = _describe_modes(config.pooling.modes)
    pooling = {"word_embedding_dimension": config.width, **modes, "include_prompt": config.pooling.include_prompt}
    _write_json(folder / "1_Pooling" / "config.json", pooling)
    for number, (step, layer) in enumerate(zip(config.steps, pooler.steps, strict=True), start=2):
        kind, settings = _describe_step(step)
        modules.append((kind, f"{number}_{kind}"))
        if settings:
            _write_json(folder / modules[-1][1] / "config.json", settings)
            _write_tensors(folder / modules[-1][1] / "model.safetensors", layer.state_dict())
    entries = [
        {"idx": number, "name": str(number), "path": path, "type": f"{_PACKAGE}.{kind}"}
        for number, (kind, path) in enumerate(modules)
    ]
    _write_json(folder / _TEXT_FILE, {"max_seq_length": config.max_tokens, "do_lower_case": config.lower_case})
    prompts = {"prompts": dict(config.prompts), "default_prompt_name": config.default_prompt}
    _write_json(folder / _PROMPTS_FILE, prompts | {"truncate_dim": config.dimensions})
    _write_json(folder / MODULES_FILE, entries)


def _describe_modes(modes: tuple[str, ...]) -> dict[str, Any]:
    """Return the modes as flags, which every version of the library reads; those of another order as a list."""
    flags = {name: mode in modes for name, mode in _MODE_SETTINGS.items()}
    if tuple(mode for name, mode in _MODE_SETTINGS.items() if flags[name]) == modes:
        return flags
    names = {ours: name for name, ours in _MODE_NAMES.items()}
    return {"pooling_mode": [names.get(mode, mode) for mode in modes]}


def _describe_step(step: SentenceStep) -> tuple[str, dict[str, Any]]:
    """Return the class of a module and its config.json."""
    match step:
        case Projection():
            name = next(name for name, ours in _ACTIVATIONS.items() if ours == step.activation)
            path = f"torch.nn.modules.{'linear' if name == 'Identity' else 'activation'}.{name}"
            sizes = {"in_features": step.input_width, "out_features": step.width, "bias": step.bias}
            return "Dense", sizes | {"activation_function": path}
        case VectorNorm():
            return "LayerNorm", {"dimension": step.width}
        case Normalize():
            return "Normalize", {}


def _write_json(path: Path, data: object) -> None:
    path.parent.mkdir(exist_ok=True)
    write_text(path, json.dumps(data, indent=2) + "\n")


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    stored = {name if "." in name else f"norm.{name}": value.contiguous().cpu() for name, value in tensors.items()}
    write_safetensors(path, stored, {"format": "pt"})
