"""Different config.json files of the same model: older and newer settings, absent and repeated ones.

Each must give the logits of transformers, which builds its model from the same file; only its weights are saved.
"""

import json

import pytest
import torch
import transformers

from clearhead.checkpoint.huggingface import load_folder
from tests.parity.harness import VOCAB, randomize

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_theta": 500.0,
    "torch_dtype": "float32",
}
LLAMA3_FACTORS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True}
QWEN3 = {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts_per_tok": 2}
EXPERTS = {**QWEN3, "moe_intermediate_size": 24, "norm_topk_prob": True, "decoder_sparse_step": 1}
YARN = {"type": "yarn", "factor": 4.0}


def without(settings, *keys):
    return {key: value for key, value in settings.items() if key not in keys}


FILES = {
    "head_dim null": {**LLAMA, "head_dim": None},
    "key-value heads absent": without(LLAMA, "num_key_value_heads"),
    "context absent": without(LLAMA, "max_position_embeddings"),
    "theta absent": without(LLAMA, "rope_theta"),
    "another activation": {**LLAMA, "hidden_act": "gelu"},
    "pretraining_tp": {**LLAMA, "pretraining_tp": 2},
    "layer_types of full attention": {**LLAMA, "layer_types": ["full_attention"] * 2},
    "llama3 by type": {**LLAMA, "rope_scaling": {"type": "llama3", "factor": 8.0, **LLAMA3_FACTORS}},
    "llama3 by rope_type": {**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA3_FACTORS}},
    "rope_parameters": {
        **without(LLAMA, "rope_theta"),
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, **LLAMA3_FACTORS},
        "dtype": "float32",
    },
    "theta twice": {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 80.0}},
    "theta outside rope_parameters": {**LLAMA, "rope_parameters": {"rope_type": "default"}},
    "rope twice": {
        **LLAMA,
        "rope_parameters": {"rope_type": "default", "rope_theta": 80.0},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "yarn": {**LLAMA, "rope_scaling": {**YARN, "original_max_position_embeddings": 16}},
    "yarn with its length at the top level": {**LLAMA, "rope_scaling": YARN, "original_max_position_embeddings": 16},
    "yarn without its length": {**LLAMA, "rope_scaling": YARN},
    "window null": {**MISTRAL, "sliding_window": None},
    "window absent": MISTRAL,
    "windows from a layer on": {**QWEN2, "sliding_window": 5, "max_window_layers": 1},
    "windows by layer": {**QWEN2, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "experts": {**EXPERTS, "num_experts": 6, "mlp_only_layers": [0]},
    "experts by another name": {**EXPERTS, "num_local_experts": 6},
}


def compare(model, settings, folder, **save_options):
    """Save the model with these settings as config.json, load it as ours and compare the logits."""
    randomize(model.eval())
    model.save_pretrained(folder, **save_options)
    (folder / "config.json").write_text(json.dumps(settings))
    tokens = torch.randint(0, VOCAB, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = model(input_ids=tokens, use_cache=False).logits
        assert (load_folder(folder).network(tokens) - theirs).abs().max() <= 1e-5


@pytest.mark.parametrize("settings", FILES.values(), ids=FILES)
def test_a_config_file_gives_the_logits_of_transformers(settings, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(tmp_path, attn_implementation="eager")
    compare(getattr(transformers, settings["architectures"][0])(config), settings, tmp_path)


@pytest.mark.parametrize("older_names", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_the_language_part_of_a_multimodal_mistral(tied, older_names, tmp_path):
    """`tie_word_embeddings` is at the top level, and newer tensor names begin with `model.language_model`."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Mistral3Config(
        text_config={**MISTRAL, "head_dim": 8, "sliding_window": None},
        vision_config={"model_type": "pixtral", "image_size": 28, "patch_size": 14, **sizes},
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = transformers.Mistral3ForConditionalGeneration(config)
    compare(model, config.to_dict(), tmp_path, save_original_format=older_names)
