"""Every field of a config class, changed one at a time: our logits equal those of transformers, or loading is refused.

Both read the same config.json, so a setting that transformers uses and we ignore shows as a difference. The fields are
those of the class and those that transformers reads from the config of any class.
"""

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from clearhead.checkpoint.huggingface import load_folder
from clearhead.errors import ClearheadError
from clearhead.families import FAMILIES
from tests.parity.config_types import TEXT_PARTS, TYPES
from tests.parity.decoder_cases import YARN
from tests.parity.harness import VOCAB, randomize

# Fields of any config that transformers reads, or that some class reads
EXTRA_FIELDS: list[tuple[str, Any]] = [
    ("is_causal", False),
    ("is_causal", None),
    ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
    ("rope_theta", 50.0),
    ("partial_rotary_factor", 0.5),
    ("head_dim", 8),
    ("sliding_window", 3),
    ("layer_types", ["sliding_attention", "full_attention"]),
    ("attention_bias", True),
    ("mlp_bias", True),
    ("clip_qkv", 0.1),
    ("attn_logit_softcapping", 1.0),
    ("final_logit_softcapping", 1.0),
    ("logit_scale", 0.5),
    ("use_qk_norm", True),
    ("qk_layernorm", True),
    ("attention_layers", ["local", "local"]),
    ("num_nextn_predict_layers", 1),
]
# They name the class or the form of its output, not what it computes.
SKIPPED = {"model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "return_dict"}
SKIPPED |= {"output_hidden_states", "output_attentions", "output_router_logits", "is_encoder_decoder"}
LENGTH, TOLERANCE = 12, 1e-4
# transformers ignores it, but the released models were trained with it; test_mpt.py compares it
KNOWN = [("mpt", "alibi_bias_max")]


def changed_values(value: Any) -> list[Any]:
    """Return other values of a field."""
    match value:
        case bool():
            return [not value, None]
        case int():
            return [value + 1, 2 * value]
        case float():
            return [1.5 * value + 0.1]
        case None:
            return [2, 0.5, True]
        case "silu" | "gelu" | "gelu_new" | "gelu_pytorch_tanh" | "relu" | "relu2" | "xielu":
            return ["relu", "gelu"]
        case [*entries] if entries:
            return [list(reversed(entries)), entries[:1] * len(entries)]
        case _:
            return []


def changes_of(data: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return (field, other value) for every field of a config, for its other names, and for fields of any config."""
    own = [(name, value) for name in data if name not in SKIPPED for value in changed_values(data[name])]
    nested = [
        (name, data[name] | {key: value})
        for name in data
        if isinstance(data[name], dict)
        for key in data[name]
        for value in changed_values(data[name][key])
    ]
    return own + nested + second_names(data) + rotary_changes(data) + EXTRA_FIELDS


def second_names(data: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return (other name that transformers has for a field, other value), beside the field itself."""
    names = transformers.AutoConfig.for_model(data["model_type"]).attribute_map
    return [(name, value) for name, field in names.items() for value in changed_values(data.get(field))]


def rotary_changes(data: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return other rotary settings of one layer type, for models in which each type has its own."""
    by_type = data.get("rope_parameters") or {}
    changes = [{"rope_theta": 50.0}, {"partial_rotary_factor": 0.5}, {"rope_type": "linear", "factor": 2.0}]
    changes += [YARN, YARN | {"truncate": True}]
    entries = [(name, entry) for name, entry in by_type.items() if isinstance(entry, dict)]
    return [("rope_parameters", by_type | {name: entry | change}) for name, entry in entries for change in changes]


def toy_data(model_type: str) -> dict[str, Any]:
    """Return config.json of the toy model of a type."""
    architecture, settings = TYPES[model_type]
    settings = {name: value for name, value in settings.items() if name != "attn_implementation"}
    config = transformers.AutoConfig.for_model(model_type, **settings)
    return config.to_dict() | {"architectures": [architecture], "dtype": "float32"}


def composite_data(model_type: str) -> dict[str, Any]:
    """Return config.json of the toy model of a type that also reads images."""
    architecture, text_type, vision = TEXT_PARTS[model_type]
    text = TYPES[text_type][1] | {"model_type": text_type}
    config = transformers.AutoConfig.for_model(model_type, text_config=text, vision_config=vision)
    return config.to_dict() | {"architectures": [architecture], "dtype": "float32"}


def composite_changes(data: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return (field, other value) for the fields of the text part."""
    text = data["text_config"]
    tied = [("tie_word_embeddings", value) for value in (False, True)]
    return [("text_config", text | {name: value}) for name, value in changes_of(text)] + tied


def keep_sinusoids(model: nn.Module, name: str, tensor: Tensor) -> Tensor | None:
    """Return the table of sinusoidal positions, which is not learned, as it is."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return tensor.clone() if "Sinusoidal" in type(owner).__name__ else None


def draw_features(config: Any) -> Tensor:
    """Return random mel bands for a model that reads audio."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)


def outcome(data: dict[str, Any], folder) -> str:
    """Return "matched", "refused", "impossible" if transformers cannot run it, or the difference."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(data))
    torch.manual_seed(0)
    tokens = torch.randint(6, VOCAB - 2, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            config = transformers.AutoConfig.from_pretrained(folder, attn_implementation="eager")
            model = getattr(transformers, data["architectures"][0])(config).eval()
            randomize(model, partial(keep_sinusoids, model))
            target = {"decoder_input_ids": tokens[:, 3:]} if model.config.is_encoder_decoder else {}
            source = draw_features(config) if hasattr(config, "num_mel_bins") else tokens
            theirs = model(**{model.main_input_name: source}, return_dict=True, **target).logits
            model.save_pretrained(folder)
    except Exception:  # whatever makes this config impossible
        return "impossible"
    (folder / "config.json").write_text(json.dumps(data))
    try:
        network = load_folder(folder).network
    except ClearheadError:
        return "refused"
    with torch.no_grad():
        ours = network(source, tokens[:, 3:]) if network.config.is_encoder_decoder else network(tokens)
    if ours.shape == theirs.shape and (ours - theirs).abs().max() <= TOLERANCE:
        return "matched"
    return f"differs by {(ours - theirs).abs().max():.2g}" if ours.shape == theirs.shape else "has another shape"


def changed_keys(data: dict[str, Any], name: str, value: Any) -> list[str]:
    """Return the field and, if it is an object, the keys in it that differ."""
    old = data.get(name)
    is_object = isinstance(old, dict) and isinstance(value, dict)
    return [name, *[key for key in old if value.get(key) != old[key]]] if is_object else [name]


def silent_differences(
    model_type: str, data: dict[str, Any], changes: list[tuple[str, Any]], folder: Path
) -> list[str]:
    """Return the changes that neither give the logits of transformers nor are refused."""
    assert outcome(data, folder / "unchanged") == "matched"
    found = []
    for number, (name, value) in enumerate(changes):
        result = outcome(data | {name: value}, folder / str(number))
        is_known = any((model_type, key) in KNOWN for key in changed_keys(data, name, value))
        if result not in ("matched", "refused", "impossible") and not is_known:
            found.append(f"{name} = {value}: {result}")
    return found


@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "olmo3", "gpt_neox", "modernbert", "umt5", "marian"])
def test_a_sample_of_fields_matches_transformers_or_is_refused(model_type, tmp_path):
    """Try the first of the fields that any config may have, and some that each class reads in its own way."""
    data = toy_data(model_type)
    changes = [*EXTRA_FIELDS[:9], ("tie_word_embeddings", False), *second_names(data), *rotary_changes(data)]
    assert not silent_differences(model_type, data, changes, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_every_field_matches_transformers_or_is_refused(model_type, tmp_path):
    data = toy_data(model_type)
    assert not silent_differences(model_type, data, changes_of(data), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TEXT_PARTS)
def test_every_field_of_a_text_part_matches_transformers_or_is_refused(model_type, tmp_path):
    data = composite_data(model_type)
    assert not silent_differences(model_type, data, composite_changes(data), tmp_path)


def test_every_model_type_is_swept():
    assert {model_type for family in FAMILIES for model_type in family.model_types} == TYPES.keys()
