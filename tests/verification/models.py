"""A toy model of every style that keeps its past in another way; weights drawn so that each has an effect."""

from dataclasses import replace

import torch

from clearhead.api import Model
from clearhead.architecture.branches import FeedForward
from clearhead.architecture.config import Head
from clearhead.architecture.parts import SlidingWindow
from clearhead.backends.cpu import library as cpu
from clearhead.errors import ClearheadError
from clearhead.families import family_of_type
from clearhead.families.bart import Size, bart
from clearhead.families.bloom import bloom
from clearhead.families.gopher import gopher
from clearhead.families.gpt import gpt
from clearhead.families.plain import multi_head
from clearhead.families.settings import Settings
from clearhead.families.t5 import t5
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


def told(data):
    return lambda: family_of_type(data["model_type"]).read(Settings(data, "toy"))


def banded():
    """GPT-3: learned positions, dense and windowed layers in turn."""
    attention = multi_head(32, 4)
    attentions = [attention, replace(attention, pattern=SlidingWindow(size=9))]
    return gpt(width=32, attentions=attentions, vocab_size=VOCAB, context=192)


STYLES = {
    "llama": lambda: tiny_config(width=32, vocab_size=VOCAB),
    "mistral": lambda: tiny_config(width=32, vocab_size=VOCAB, window=10),
    "gemma3": told(GEMMA3),
    "llama4": told(LLAMA4),
    "deepseek": told(DEEPSEEK),
    "bloom": lambda: bloom(width=32, num_layers=2, num_heads=4, vocab_size=VOCAB, context=512),
    "gopher": lambda: gopher(width=32, num_layers=2, num_heads=4, head_width=8, vocab_size=VOCAB),
    "gpt2": lambda: gpt(width=32, attentions=[multi_head(32, 4)] * 2, vocab_size=VOCAB, context=192),
    "gpt3": banded,
    "t5": lambda: t5(
        width=32,
        num_layers=2,
        num_heads=4,
        head_width=8,
        feed_forward=FeedForward(width=40, activation="gelu_tanh", gated=True),
        head=Head(tied=False),
        vocab_size=VOCAB,
        max_distance=20,
    ),
    "bart": lambda: bart(
        "bart",
        width=32,
        encoder=Size(num_layers=2, num_heads=4, feed_forward=40),
        decoder=Size(num_layers=2, num_heads=4, feed_forward=40),
        vocab_size=VOCAB,
        context=192,
        activation="gelu",
        scaled=False,
    ),
    "bert": told(BERT),
}


def kernels_are_here():
    """Built, or a compiler to build them."""
    try:
        return cpu.kernel_library(build=True) is not None
    except ClearheadError:
        return False


def toy_model(style, dtype=torch.float32):
    network = Transformer(STYLES[style]()).eval()
    redraw(network)
    return Model(network.to(dtype))
