"""Toy models with every kind of cache and attention, with random weights that all have an effect."""

from dataclasses import replace

import torch

from clearhead.api import Model
from clearhead.architecture import FeedForward, Head, SlidingWindow
from clearhead.backends.cpu_kernels import library as cpu
from clearhead.errors import ClearheadError
from clearhead.families import family_of_type
from clearhead.families.bart import StackSize, bart_config
from clearhead.families.bloom import bloom_config
from clearhead.families.gopher import gopher_config
from clearhead.families.gpt import gpt_config
from clearhead.families.gpt_style import multi_head_attention
from clearhead.families.settings import Settings
from clearhead.families.t5 import t5_config
from clearhead.model.transformer import Transformer
from tests.checkpoint.tiny import tiny_config
from tests.model.toys import redraw

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-3,
}
GEMMA3 = SIZES | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "sliding_window": 11,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 8,
}
LLAMA4 = SIZES | {
    "model_type": "llama4_text",
    "num_hidden_layers": 5,
    "attention_chunk_size": 13,
    "floor_scale": 5,
    "num_local_experts": 4,
    "intermediate_size_mlp": 48,
    "interleave_moe_layer_step": 2,
}
DEEPSEEK = SIZES | {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
}
BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 128,
}


def from_settings(data):
    return lambda: family_of_type(data["model_type"]).read_config(Settings(data, "toy"))


def gpt3_like():
    """Return the config of a small GPT-3: learned positions, alternating dense and windowed layers."""
    attention = multi_head_attention(32, 4)
    attentions = [attention, replace(attention, pattern=SlidingWindow(size=9))]
    return gpt_config(width=32, attentions=attentions, vocab_size=VOCAB, context=192)


STYLES = {
    "llama": lambda: tiny_config(width=32, vocab_size=VOCAB),
    "mistral": lambda: tiny_config(width=32, vocab_size=VOCAB, window=10),
    "gemma3": from_settings(GEMMA3),
    "llama4": from_settings(LLAMA4),
    "deepseek": from_settings(DEEPSEEK),
    "bloom": lambda: bloom_config(width=32, num_layers=2, num_heads=4, vocab_size=VOCAB, context=512),
    "gopher": lambda: gopher_config(width=32, num_layers=2, num_heads=4, head_width=8, vocab_size=VOCAB),
    "gpt2": lambda: gpt_config(width=32, attentions=[multi_head_attention(32, 4)] * 2, vocab_size=VOCAB, context=192),
    "gpt3": gpt3_like,
    "t5": lambda: t5_config(
        width=32,
        num_layers=2,
        num_heads=4,
        head_width=8,
        feed_forward=FeedForward(width=40, activation="gelu_tanh", gated=True),
        head=Head(tied=False),
        vocab_size=VOCAB,
        max_distance=20,
    ),
    "bart": lambda: bart_config(
        "bart",
        width=32,
        encoder=StackSize(num_layers=2, num_heads=4, feed_forward=40),
        decoder=StackSize(num_layers=2, num_heads=4, feed_forward=40),
        vocab_size=VOCAB,
        context=192,
        activation="gelu",
        scaled=False,
    ),
    "bert": from_settings(BERT),
}


def kernels_available():
    """Return whether the C++ kernels are built, or can be built with the compiler of this machine."""
    try:
        return cpu.load_kernel_library(build=True) is not None
    except ClearheadError:
        return False


def toy_model(style, dtype=torch.float32):
    network = Transformer(STYLES[style]()).eval()
    redraw(network)
    return Model(network.to(dtype))
