"""Modules of the transformers library in memory, without a folder: to our network and back.

    parts = read_module(transformers.AutoModelForCausalLM.from_config(config)); module = build_module(parts)

Both directions use the tables of the families. transformers stores tensors under other names than those of its modules;
its own functions translate between the two. No code of a model from the Hub is run.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from clearhead.backends import is_packed
from clearhead.checkpoint.folder_tokenizer import load_folder_tokenizer
from clearhead.checkpoint.huggingface import assemble_model, join_tensor
from clearhead.checkpoint.huggingface_config import (
    folder_config,
    language_settings_of,
    merge_special_ids,
    name_table,
)
from clearhead.checkpoint.interface import ModelParts
from clearhead.checkpoint.labels import read_labels
from clearhead.checkpoint.placement import stored_tensors
from clearhead.checkpoint.speech import read_speech
from clearhead.checkpoint.tensors import LazyTensors
from clearhead.errors import ClearheadError
from clearhead.families import Settings, expand_table, family_for, family_of_type
from clearhead.tokenization import Tokenizer


def read_module(module: nn.Module) -> ModelParts:
    """Return a network with a copy of the weights of a transformers module, without a tokenizer.

    Raise ClearheadError if the class is not one of transformers, or if its weights are quantized or have adapters.
    """
    transformers = _import_transformers()
    name = type(module).__name__
    _check_module(module, transformers)
    config: Any = module.config
    settings = Settings(json.loads(config.to_json_string()) | {"architectures": [name]}, name)
    family = family_of_type(language_settings_of(settings).string("model_type"))
    tensors = _stored_by_transformers(module)
    network = assemble_model(family, settings, LazyTensors(tensors, lambda key: tensors[key].detach().clone()), name)
    defaults: Any = getattr(module, "generation_config", None)  # None: the class does not generate
    generation = {} if defaults is None else json.loads(defaults.to_json_string())
    generation_settings = Settings(generation, f"the generation_config of {name}")
    special_ids = merge_special_ids(settings, generation_settings)
    labels = read_labels(network.config.classifier, settings)
    speech = read_speech(network.config, generation_settings)
    return ModelParts(network, None, family, special_ids, None, labels, speech=speech)


def _check_module(module: nn.Module, transformers: ModuleType) -> None:
    """Raise ClearheadError unless a module is of a class of transformers, with full weights and no adapter."""
    kind, where = type(module).__name__, type(module).__module__
    if not isinstance(module, transformers.PreTrainedModel) or not where.startswith("transformers."):
        raise ClearheadError(
            f"{kind} of {where} is not a class of transformers, so what it computes is not known; pass a module such "
            "as transformers.LlamaForCausalLM, or the model inside yours"
        )
    if getattr(module, "hf_quantizer", None) is not None:
        raise ClearheadError("the module has quantized weights; give its folder to clearhead.load")
    if getattr(module, "_hf_peft_config_loaded", False):
        raise ClearheadError("the module has an adapter; merge it first (PEFT: merge_and_unload)")


def _stored_by_transformers(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that `module.save_pretrained` would write, under the names in the file."""
    saving, loading = _import_internals()
    ignored = set(module._keys_to_ignore_on_save or ())  # type: ignore[arg-type]
    tensors = {name: tensor for name, tensor in module.state_dict().items() if name not in ignored}
    untied = saving.remove_tied_weights_from_state_dict(tensors, module)
    return loading.revert_weight_conversion(module, untied)


def read_transformers_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """Return a tokenizer of transformers as ours; its files pass through a temporary folder."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return load_folder_tokenizer(Path(folder))


def build_module(parts: ModelParts) -> nn.Module:
    """Return a module of transformers with a copy of the weights, in evaluation mode.

    Raise ClearheadError if transformers has no class for the network.
    """
    transformers = _import_transformers()
    network = parts.network
    if is_packed(network):
        raise ClearheadError("transformers cannot read packed weights; load the model with full weights instead")
    family = parts.family or family_for(network.config)
    config = folder_config(network, family, parts.special_ids, parts.labels)
    (class_name,) = config["architectures"]
    module_class = getattr(transformers, class_name, None)
    if module_class is None:
        raise ClearheadError(f"transformers {transformers.__version__} has no class {class_name}; install a newer one")
    tensors = stored_tensors(network)
    rules = dict(expand_table(name_table(family), network.config, set(tensors)))
    joined = {name: join_tensor(rule, tensors, network.config) for name, rule in rules.items()}
    with _quiet(transformers):
        module, report = module_class.from_pretrained(
            None,
            config=module_class.config_class.from_dict(config),
            state_dict=joined,
            dtype=config["dtype"],
            output_loading_info=True,
        )
    # Tensors that we never read are those that transformers computes itself, such as sinusoids.
    computed = [re.compile(pattern) for pattern in family.ignored_tensors]
    missing = [name for name in report["missing_keys"] if not any(pattern.fullmatch(name) for pattern in computed)]
    wrong = sorted({*missing, *report["unexpected_keys"]})
    if wrong:  # a class whose tensors were renamed in this release of transformers
        raise ClearheadError(f"transformers {transformers.__version__} does not read {wrong[0]} of {class_name}")
    if parts.speech is not None:
        module.generation_config = transformers.GenerationConfig(**parts.speech.settings(network.config.context))
    return module.to(network.device).eval()


@contextmanager
def _quiet(transformers: ModuleType) -> Iterator[None]:
    """Silence the progress bars and reports of transformers; what matters is checked by the caller."""
    logging = transformers.utils.logging
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _import_transformers() -> ModuleType:
    """Return the transformers library; raise ClearheadError with what would work if it is missing."""
    try:
        return import_module("transformers")
    except ImportError:
        raise ClearheadError("this needs the transformers library; run: pip install 'transformers>=5'") from None


def _import_internals() -> tuple[Any, Any]:
    """Return the modules of transformers that translate between the names in memory and those in files."""
    try:
        return import_module("transformers.modeling_utils"), import_module("transformers.core_model_loading")
    except ImportError:
        raise ClearheadError("this needs transformers 5 or newer; run: pip install --upgrade transformers") from None
