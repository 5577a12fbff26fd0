"""Every field of a config class, changed one at a time: our logits equal those of transformers, or loading is refused.

Both read the same config.json, so a setting that transformers uses and we ignore shows as a difference. The fields are
those of the class and those that transformers reads from the config of any class.
"""

import json
import warnings
from typing import Any

import pytest
import torch
import transformers

from clearhead.checkpoint.huggingface import load_folder
from clearhead.errors import ClearheadError
from tests.parity.decoder_cases import ARCHITECTURES, EXPERTS, GPT, RMS, SETTINGS, SHARED, SIZES
from tests.parity.harness import VOCAB, randomize

LATENT = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
DEEPSEEK = RMS | LATENT | {"num_key_value_heads": 4, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 1}
DEEPSEEK |= {"moe_intermediate_size": 24, "n_shared_experts": 1, "topk_group": 1, "first_k_dense_replace": 1}
LLAMA4 = RMS | EXPERTS | {"head_dim": 16, "intermediate_size_mlp": 60, "attention_chunk_size": 5, "floor_scale": 4}
# model type -> class, toy settings; besides the rows of the decoder tables
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", RMS),
    "mistral": ("MistralForCausalLM", RMS | {"sliding_window": 5}),
    "smollm3": ("SmolLM3ForCausalLM", RMS),
    "qwen2": ("Qwen2ForCausalLM", RMS),
    "qwen3": ("Qwen3ForCausalLM", RMS | {"head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", RMS | SHARED | {"head_dim": 16}),
    "gemma3_text": ("Gemma3ForCausalLM", RMS | {"head_dim": 16, "sliding_window": 5}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", DEEPSEEK | {"topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", DEEPSEEK),
    "llama4_text": ("Llama4ForCausalLM", LLAMA4),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "openai-gpt": ("OpenAIGPTLMHeadModel", {key: GPT[key] for key in GPT if key != "n_inner"}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        SIZES
        | {"hidden_size": 48, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
        | {"max_position_embeddings": 128, "window_size": 5, "intermediate_size": 80},
    ),
    "bloom": ("BloomForCausalLM", SIZES | {"hidden_size": 48, "n_layer": 2, "n_head": 4}),
    "mpt": ("MptForCausalLM", SIZES | {"d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}),
}
TYPES = {name: (ARCHITECTURES[name], first) for name, (first, *_) in SETTINGS.items()} | OTHERS
# Fields of any config that transformers reads, or that some class reads
EXTRA_FIELDS: list[tuple[str, Any]] = [
    ("is_causal", False),
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


def changed_values(value: Any) -> list[Any]:
    """Return other values of a field."""
    match value:
        case bool():
            return [not value]
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
    """Return (field, other value) for every field of a config, and the fields that any config may have."""
    own = [(name, value) for name in data if name not in SKIPPED for value in changed_values(data[name])]
    nested = [
        (name, data[name] | {key: value})
        for name in data
        if isinstance(data[name], dict)
        for key in data[name]
        for value in changed_values(data[name][key])
    ]
    return own + nested + EXTRA_FIELDS


def toy_data(model_type: str) -> dict[str, Any]:
    """Return config.json of the toy model of a type."""
    architecture, settings = TYPES[model_type]
    config = transformers.AutoConfig.for_model(model_type, **settings)
    return config.to_dict() | {"architectures": [architecture], "dtype": "float32"}


def outcome(data: dict[str, Any], folder) -> str:
    """Return "matched", "refused", "impossible" if transformers cannot run it, or the difference."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(data))
    torch.manual_seed(0)
    tokens = torch.randint(2, VOCAB - 2, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            config = transformers.AutoConfig.from_pretrained(folder, attn_implementation="eager")
            model = getattr(transformers, data["architectures"][0])(config).eval()
            randomize(model)
            theirs = model(input_ids=tokens, use_cache=False, return_dict=True).logits
            model.save_pretrained(folder)
    except Exception:  # whatever makes this config impossible
        return "impossible"
    (folder / "config.json").write_text(json.dumps(data))
    try:
        network = load_folder(folder).network
    except ClearheadError:
        return "refused"
    with torch.no_grad():
        ours = network(tokens)
    if ours.shape == theirs.shape and (ours - theirs).abs().max() <= TOLERANCE:
        return "matched"
    return f"differs by {(ours - theirs).abs().max():.2g}" if ours.shape == theirs.shape else "has another shape"


def silent_differences(model_type: str, changes: list[tuple[str, Any]], folder) -> list[str]:
    data = toy_data(model_type)
    assert outcome(data, folder / "unchanged") == "matched"
    found = []
    for number, (name, value) in enumerate(changes):
        result = outcome(data | {name: value}, folder / str(number))
        if result not in ("matched", "refused", "impossible"):
            found.append(f"{name} = {value}: {result}")
    return found


@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "gpt_neox"])
def test_a_sample_of_fields_matches_transformers_or_is_refused(model_type, tmp_path):
    """Try the fields that any config may have."""
    assert not silent_differences(model_type, EXTRA_FIELDS[:8], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_every_field_matches_transformers_or_is_refused(model_type, tmp_path):
    assert not silent_differences(model_type, changes_of(toy_data(model_type)), tmp_path)
