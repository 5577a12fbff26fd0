"""A toy config of every model type, for tests that change the fields of config.json one at a time.

class_name, settings = TYPES["bart"]    # "BartForConditionalGeneration", {"vocab_size": 97, ...}
"""

from typing import Any

from tests.parity.decoder_cases import ARCHITECTURES, EXPERTS, GPT, RMS, SETTINGS, SHARED, SIZES
from tests.parity.test_encoders import ALBERT, DEBERTA, DISTIL, ELECTRA, MODERN, NORMS, ROBERTA
from tests.parity.test_encoders import SMALL as ENCODER
from tests.parity.test_translation import LED, T5
from tests.parity.test_translation import SIZES as BART
from tests.parity.test_whisper import SIZES as WHISPER

ToyType = tuple[str, dict[str, Any]]  # class in transformers, settings

LATENT = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
DEEPSEEK = RMS | LATENT | {"num_key_value_heads": 4, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 1}
DEEPSEEK |= {"moe_intermediate_size": 24, "n_shared_experts": 1, "topk_group": 1, "first_k_dense_replace": 1}
LLAMA4 = RMS | EXPERTS | {"head_dim": 16, "intermediate_size_mlp": 60, "attention_chunk_size": 5, "floor_scale": 4}
DECODERS: dict[str, ToyType] = {name: (ARCHITECTURES[name], first) for name, (first, *_) in SETTINGS.items()}
DECODERS |= {
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
BERT = ENCODER | NORMS | {"num_hidden_layers": 2}
ENCODERS: dict[str, ToyType] = {
    "bert": ("BertForMaskedLM", BERT),
    "roberta": ("RobertaForMaskedLM", ROBERTA),
    "xlm-roberta": ("XLMRobertaForMaskedLM", ROBERTA),
    "camembert": ("CamembertForMaskedLM", ROBERTA),
    "distilbert": ("DistilBertForMaskedLM", DISTIL),
    "mpnet": ("MPNetForMaskedLM", BERT),
    "electra": ("ElectraForMaskedLM", ELECTRA),
    "albert": ("AlbertForMaskedLM", ALBERT),
    "modernbert": ("ModernBertForMaskedLM", MODERN),
    "deberta-v2": ("DebertaV2ForMaskedLM", DEBERTA),
    "nomic_bert": ("NomicBertForMaskedLM", BERT | {"pad_token_id": 0}),
}
TRANSLATORS: dict[str, ToyType] = {
    "bart": ("BartForConditionalGeneration", BART),
    "mbart": ("MBartForConditionalGeneration", BART),
    "marian": ("MarianMTModel", BART),
    "pegasus": ("PegasusForConditionalGeneration", BART),
    "m2m_100": ("M2M100ForConditionalGeneration", BART),
    "bigbird_pegasus": ("BigBirdPegasusForConditionalGeneration", BART | {"attention_type": "original_full"}),
    "led": ("LEDForConditionalGeneration", LED),
    "t5": ("T5ForConditionalGeneration", T5),
    "mt5": ("MT5ForConditionalGeneration", T5),
    "umt5": ("UMT5ForConditionalGeneration", T5),
}
SPEECH_MODELS: dict[str, ToyType] = {"whisper": ("WhisperForConditionalGeneration", WHISPER)}
TYPES = DECODERS | ENCODERS | TRANSLATORS | SPEECH_MODELS
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
LLAMA4_VISION = VISION | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
# model type of a model that also reads images -> class, type of its text part, settings of its vision part
TEXT_PARTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text", VISION),
    "llama4": ("Llama4ForConditionalGeneration", "llama4_text", LLAMA4_VISION),
    "mistral3": ("Mistral3ForConditionalGeneration", "mistral", VISION | {"model_type": "pixtral"}),
}
