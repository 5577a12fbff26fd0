"""Adapters in the folder format of the PEFT library: LoRA, rank-stabilized LoRA and DoRA.

    adapters = AdapterSet(network, family); adapters.add("pirate", folder); adapters.use("pirate"); adapters.use()

A folder has adapter_config.json and adapter_model.safetensors with A (rank, in) and B (out, rank) for each changed
module, named as in transformers. With s = alpha / r, or alpha / sqrt(r) if rank-stabilized:

    LoRA    W' = W + s B A
    DoRA    W' = m (W + s B A) / |W + s B A|        the norm of each row, and a learned m for it

Sources: Hu et al. 2021, section 4.1; Kalajdzievski 2023; Liu et al. 2024, equation 5.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from clearhead.architecture import ModelConfig
from clearhead.checkpoint.adapter import Adapter
from clearhead.checkpoint.placement import stored_tensors
from clearhead.errors import ClearheadError, quote, require, unknown_name
from clearhead.families import Family, Settings, TensorRule, expand_table, names_with_classifier, split_expert_index
from clearhead.files import read_json, write_text
from clearhead.home import expand_user
from clearhead.model import Transformer
from clearhead.tensor_files import read_safetensors, write_safetensors

_CONFIG_FILE, _TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # start of all names in the file
# The initial values of others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) are subtracted from the weights of the base model.
_INITIALIZATIONS_OF_ADAPTERS = (True, False, "gaussian", "eva", "orthogonal", "mica")
# Settings of PEFT 0.21 that select a variant of LoRA with another formula.
_OTHER_KINDS = ("alora_invocation_tokens", "arrow_config", "kasa_config", "use_bdlora", "use_qalora")
_REDUCE, _EXPAND, _MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"


@dataclass(frozen=True)
class ModuleChange:
    """The change of one linear layer."""

    reduce: Tensor  # A (rank, in)
    expand: Tensor  # B (out, rank)
    scale: float
    magnitude: Tensor | None = None  # m (out,) of DoRA

    def apply(self, weight: Tensor) -> Tensor:
        """Return the changed weight (out, in) in float32."""
        changed = weight.float() + self.scale * (self.expand.float() @ self.reduce.float())
        if self.magnitude is None:
            return changed
        return changed * (self.magnitude.float() / changed.norm(dim=1))[:, None]


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter of the PEFT library."""

    base: str  # the model that it changes: a folder or a Hub id
    changes: Mapping[str, ModuleChange]  # by transformers' names of modules
    transposed: bool  # the weights of the modules are stored (in, out), as in GPT-2
    alpha: float
    rank: int
    rank_stabilized: bool

    @property
    def has_magnitudes(self) -> bool:
        """Whether this is DoRA."""
        return any(change.magnitude is not None for change in self.changes.values())


# --- files


def is_peft_adapter(path: str | Path) -> bool:
    """Return whether a path is a folder with an adapter of the PEFT library."""
    try:
        return (expand_user(path) / _CONFIG_FILE).is_file()
    except OSError:  # a name that is too long to be a path
        return False


def read_peft_adapter(path: str | Path) -> PeftAdapter:
    """Read an adapter. Raise ClearheadError if a file is damaged or the kind of adapter is not supported."""
    folder = expand_user(path)
    settings = Settings(read_json(folder / _CONFIG_FILE), str(folder / _CONFIG_FILE))
    settings.allow_only("peft_type", "LORA")
    settings.allow_only("bias", "none")
    for name in ("lora_bias", "modules_to_save", "layer_replication", "trainable_token_indices", "megatron_config"):
        settings.allow_only(name, None, False, [], {})
    for name in ("rank_pattern", "alpha_pattern"):
        settings.allow_only(name, None, {})
    for name in _OTHER_KINDS:
        settings.allow_only(name, None, False)
    settings.allow_only("init_lora_weights", *_INITIALIZATIONS_OF_ADAPTERS)
    rank, alpha = settings.integer("r", at_least=1), settings.number("lora_alpha")
    stabilized = settings.boolean("use_rslora", False)
    scale = alpha / (math.sqrt(rank) if stabilized else rank)
    require(math.isfinite(scale), f"{settings.where} has the scale {scale}; it must be finite")
    tensors, _ = read_safetensors(folder / _TENSOR_FILE)
    changes = _read_changes(tensors, rank, scale, str(folder / _TENSOR_FILE))
    adapter = PeftAdapter(
        settings.string("base_model_name_or_path", ""),
        changes,
        settings.boolean("fan_in_fan_out", False),
        alpha,
        rank,
        stabilized,
    )
    if adapter.has_magnitudes != settings.boolean("use_dora", False):
        raise ClearheadError(f"{folder}: use_dora of {_CONFIG_FILE} does not fit the tensors of {_TENSOR_FILE}")
    return adapter


def _read_changes(tensors: Mapping[str, Tensor], rank: int, scale: float, where: str) -> dict[str, ModuleChange]:
    """Return the changes by the names of modules; every tensor must belong to one."""
    modules = {name.removesuffix(_REDUCE) for name in tensors if name.endswith(_REDUCE)}
    known = {module + end for module in modules for end in (_REDUCE, _EXPAND, _MAGNITUDE)}
    unknown = next((name for name in tensors if name not in known or not name.startswith(_PREFIX)), None)
    if unknown is not None:
        raise ClearheadError(f"{where} has the tensor {quote(unknown)}, which is not a part of LoRA or DoRA")
    require(bool(modules), f"{where} has no tensors named MODULE{_REDUCE}")
    changes = {}
    for module in sorted(modules):
        reduce, expand = tensors[module + _REDUCE], tensors.get(module + _EXPAND)
        magnitude = tensors.get(module + _MAGNITUDE)
        fits = expand is not None and reduce.ndim == expand.ndim == 2 and len(reduce) == expand.shape[1] == rank
        if not fits or (magnitude is not None and expand is not None and magnitude.shape != (len(expand),)):
            raise ClearheadError(f"{where}: the tensors of {quote(module)} do not fit each other and the rank {rank}")
        assert expand is not None
        for tensor in (reduce, expand, *(() if magnitude is None else (magnitude,))):
            finite = tensor.is_floating_point() and bool(tensor.float().isfinite().all())
            require(finite, f"{where}: a tensor of {quote(module)} does not hold finite numbers")
        changes[module.removeprefix(_PREFIX)] = ModuleChange(reduce, expand, scale, magnitude)
    return changes


def save_peft_adapter(folder: Path, adapter: PeftAdapter) -> None:
    """Write an adapter as PEFT does. The description is written last, so an incomplete folder is not an adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _CONFIG_FILE).unlink(missing_ok=True)
    tensors: dict[str, Tensor] = {}
    for module, change in adapter.changes.items():
        parts = {_REDUCE: change.reduce, _EXPAND: change.expand, _MAGNITUDE: change.magnitude}
        tensors |= {f"{_PREFIX}{module}{end}": part for end, part in parts.items() if part is not None}
    write_safetensors(folder / _TENSOR_FILE, {name: each.detach().cpu().contiguous() for name, each in tensors.items()})
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(adapter.changes),
        "fan_in_fan_out": adapter.transposed,
        "use_rslora": adapter.rank_stabilized,
        "use_dora": adapter.has_magnitudes,
        "inference_mode": True,
    }
    write_text(folder / _CONFIG_FILE, json.dumps(description, indent=2) + "\n")


def to_peft(adapter: Adapter, network: Transformer, family: Family) -> PeftAdapter:
    """Return an adapter of our own format with transformers' names of the modules."""
    names = {rule.own_names: name for name, rule in _rules(network, family).items()}
    changes = {}
    for own_name, (reduce, expand) in adapter.matrices.items():
        name = names.get((f"{own_name}.weight",))
        rule = None if name is None else _rules(network, family)[name]
        index = torch.arange(len(expand) * reduce.shape[1]).reshape(len(expand), reduce.shape[1])
        if name is None or rule is None or not torch.equal(rule.join([index], network.config), index):
            raise ClearheadError(
                f"PEFT cannot express this adapter, because transformers stores {own_name} in another form; merge it"
            )
        changes[name.removesuffix(".weight")] = ModuleChange(reduce, expand, adapter.scale)
    ranks = {len(change.reduce) for change in changes.values()}
    require(len(ranks) == 1, "PEFT cannot express this adapter, because its matrices have several ranks; merge it")
    rank = ranks.pop()
    return PeftAdapter(adapter.base, changes, False, adapter.scale * rank, rank, False)


# --- networks


class AdapterSet:
    """Adapters of one network, of which none, one or several are in use. Only changed matrices are kept twice."""

    def __init__(self, network: Transformer, family: Family):
        self.network, self.family = network, family
        self.adapters: dict[str, PeftAdapter] = {}
        self._originals: dict[str, Tensor] = {}

    def add(self, name: str, folder: str | Path) -> None:
        """Read an adapter, which has no effect until `use`. Raise ClearheadError if it does not fit the network."""
        adapter = read_peft_adapter(folder)
        _changed_tensors(self.network, self.family, [adapter])
        self.adapters[name] = adapter

    @torch.no_grad()
    def use(self, *names: str) -> None:
        """Use these adapters together: the sum of their changes; without names, the network as it was."""
        unknown = next((name for name in names if name not in self.adapters), None)
        if unknown is not None:
            raise unknown_name("adapter", unknown, self.adapters)
        for own_name, tensor in self._originals.items():
            self.network.get_parameter(own_name).copy_(tensor)
        self._originals = {}
        changed = _changed_tensors(self.network, self.family, [self.adapters[name] for name in names])
        for own_name, tensor in changed.items():
            parameter = self.network.get_parameter(own_name)
            self._originals[own_name] = parameter.detach().clone()
            parameter.copy_(tensor)

    def merge(self) -> None:
        """Make the adapters in use a permanent part of the network: `use` can no longer remove them."""
        self._originals = {}


def merge_peft_adapter(network: Transformer, family: Family | None, adapter: PeftAdapter) -> None:
    """Change the weights of a network. Raise ClearheadError, without a change, if the adapter does not fit."""
    if family is None:
        raise ClearheadError("the adapter names modules of transformers, whose names for this model are not known")
    with torch.no_grad():
        for own_name, tensor in _changed_tensors(network, family, [adapter]).items():
            network.get_parameter(own_name).copy_(tensor)


def _rules(network: Transformer, family: Family) -> dict[str, TensorRule]:
    table = names_with_classifier(family)
    return dict(expand_table(table, network.config, set(stored_tensors(network))))


def _changed_tensors(network: Transformer, family: Family, adapters: Sequence[PeftAdapter]) -> dict[str, Tensor]:
    """Return the changed weights by our names, without changing the network."""
    rules, changed = _rules(network, family), dict[str, Tensor]()
    if len(adapters) > 1 and any(adapter.has_magnitudes for adapter in adapters):
        raise ClearheadError("DoRA rescales the whole weight, so it cannot be used together with another adapter")
    for adapter in adapters:
        for module, change in adapter.changes.items():
            rule = rules.get(f"{module}.weight") or rules.get(f"{family.base_model_prefix}{module}.weight")
            if rule is None or any(split_expert_index(name)[1] is not None for name in rule.own_names):
                raise ClearheadError(f"the adapter changes {quote(module)}, which this model does not have as a matrix")
            changed |= _apply(network, rule, change, changed, transposed=adapter.transposed)
    return changed


def _apply(
    network: Transformer, rule: TensorRule, change: ModuleChange, changed: Mapping[str, Tensor], *, transposed: bool
) -> dict[str, Tensor]:
    """Return the tensors of a rule after a change. `changed` are those that other adapters have changed before."""
    config: ModelConfig = network.config
    parts = [network.get_parameter(name).detach() for name in rule.own_names]
    stored = rule.join([changed.get(name, part) for name, part in zip(rule.own_names, parts, strict=True)], config)
    weight = stored.T if transposed else stored
    if weight.ndim != 2 or weight.shape != (len(change.expand), change.reduce.shape[1]):
        raise ClearheadError(
            f"the adapter's matrices of shapes {tuple(change.reduce.shape)} and {tuple(change.expand.shape)} do not "
            f"fit {rule.own_names[0]} of shape {tuple(weight.shape)}; the adapter belongs to another model"
        )
    on_device = ModuleChange(
        change.reduce.to(weight.device),
        change.expand.to(weight.device),
        change.scale,
        None if change.magnitude is None else change.magnitude.to(weight.device),
    )
    result = on_device.apply(weight)
    result = result.T.contiguous() if transposed else result
    split = rule.split(result, [part.shape for part in parts], config)
    return dict(zip(rule.own_names, split, strict=True))
