"""A small network of every GGUF architecture, with random weights that float16 can represent."""

from dataclasses import replace
from unittest import mock

import torch

import clearhead
from clearhead.architecture import Causal, Chunked, Experts, LatentAttention, LongRopeScaling, Rope
from clearhead.checkpoint import gguf_save
from clearhead.families import GGUF_ARCHITECTURES, TinySizes, shrink
from clearhead.families.rope import yarn_score_scale
from clearhead.model import Transformer
from tests.model.toys import redraw

CONTEXT = 64
SIZES = TinySizes(vocab_size=300, width=64, context=CONTEXT, head_width=16, feed_forward=96, expert=96, window=24)
# architecture in our table -> preset
PRESETS = {
    "llama": "llama-7b",
    "qwen2": "seed-oss-36b",  # the same network as one of Qwen 2
    "qwen3": "qwen3-0.6b",
    "gemma3": "gemma-3-1b",
    "gpt2": "gpt2",
    "gemma": "gemma-2b",
    "gemma2": "gemma-2-2b",
    "phi2": "phi-2",
    "phi3": "phi-3-mini-4k",
    "gptneox": "pythia-160m",
    "starcoder2": "starcoder2-3b",
    "stablelm": "stablelm-3b-4e1t",
    "nemotron": "minitron-4b",
    "olmo": "olmo-1b",
    "olmo2": "olmo-2-1b",
    "olmo3": "olmo-3-7b",
    "command-r": "command-r",
    "cohere2": "command-r7b",
    "granite": "granite-3.1-2b",
    "glm4": "glm-4-9b-0414",
    "chatglm": "glm-4-9b",
    "chatglm-fused": "glm-4-9b",
    "smollm3": "smollm3-3b",
    "arcee": "afm-4.5b",
    "seed_oss": "seed-oss-36b",
    "ernie4_5": "ernie-4.5-0.3b",
    "exaone4": "exaone-4.0-32b",
    "falcon": "falcon-40b",
    "bloom": "bloom-560m",
    "mpt": "mpt-7b",
    "starcoder": "starcoder-15b",
    "hunyuan-dense": "hunyuan-7b",
    "apertus": "apertus-8b",
    "mixtral": "mixtral-8x7b",
    "granitemoe": "granite-3.1-1b-a400m",
    "olmoe": "olmoe-1b-7b",
    "qwen2moe": "qwen1.5-moe-a2.7b",
    "qwen3moe": "qwen3-30b-a3b",
    "gpt-oss": "gpt-oss-20b",
    "glm4moe": "glm-4.5-air",
    "deepseek2": "deepseek-v3",
    "deepseek-v2": "deepseek-v2",
    "llama4": "llama-4-scout",
    "bert": "bert-base",
    "nomic-bert": "nomic-embed-v1.5",
    "modern-bert": "modernbert-base",
    "t5": "t5-v1.1-small",
    "t5encoder": "t5-v1.1-small",
    "umt5": "umt5-small",
    "umt5encoder": "umt5-small",
    "helium": "helium-1-2b",
}
ENCODERS = ("bert", "nomic-bert", "modern-bert", "t5encoder", "umt5encoder")
ENCODER_DECODERS = ("t5", "umt5")
ROWS = {
    "umt5": "t5",
    "umt5encoder": "t5encoder",
    "helium": "ernie4_5",
}  # name above -> architecture in our table, where it is another
# The same in files
STORED_NAMES = {
    "mixtral": "llama", "deepseek-v2": "deepseek2", "olmo3": "olmo2", "chatglm-fused": "chatglm", **ROWS
}  # fmt: skip
# Encoders that llama.cpp stores as BERT, without the rows of their position table that no token uses -> preset
STORED_AS_BERT = {
    "distilbert": "distilbert-base",
    "roberta": "roberta-base",
    "xlm-roberta": "xlm-roberta-base",
    "camembert": "camembert-base",
}


def toy_config(architecture):
    """Return the config of a small model."""
    config = shrink(clearhead.preset((PRESETS | STORED_AS_BERT)[architecture]), SIZES)
    if architecture in ENCODER_DECODERS:
        return config
    if architecture in ("t5encoder", "umt5encoder"):
        return replace(config, decoder=None, head=None, share_embeddings=False)
    if config.encoder is not None:  # files hold neither pooler nor language head
        return replace(config, head=None, pooler=False, classifier=None)
    layers = []
    for layer in config.decoder.layers:
        attention = layer.attention
        if architecture in ("gemma2", "gemma3"):  # llama.cpp derives the scale from the head width
            attention = replace(attention, scale=attention.head_width**-0.5)
        if architecture in ("starcoder2", "hunyuan-dense"):  # metadata holds the base in float32
            attention = replace(attention, position=replace(attention.position, theta=5000.0))
        if architecture in ("phi3", "starcoder2"):  # llama.cpp ignores the window; here it covers all tokens of a test
            attention = replace(attention, pattern=replace(attention.pattern, size=CONTEXT))
        if architecture == "exaone4":  # llama.cpp: windows and layers without positions only with 64 layers
            attention = replace(attention, pattern=Causal(), position=config.decoder.layers[0].attention.position)
        if architecture == "llama4" and isinstance(attention.pattern, Chunked):  # llama.cpp fixes the size of a chunk
            attention = replace(attention, pattern=Chunked(size=8192))
        if architecture == "gpt-oss":  # llama.cpp rounds the bounds of YaRN's ramp; these do not change by that
            scaling = replace(attention.position.scaling, original_context=192)
            attention = replace(attention, position=replace(attention.position, theta=4.8, scaling=scaling))
        if architecture == "arcee":  # GGUF keys do not have all settings of this scaling
            assert isinstance(attention.position, Rope)
            attention = replace(attention, position=replace(attention.position, scaling=None))
        if isinstance(attention, LatentAttention):  # the scale follows from YaRN's factor and the width
            width = attention.plain_width + attention.rotary_width
            attention = replace(attention, scale=yarn_score_scale(width, attention.rope.scaling.factor, 1.0))
        if architecture in ("bloom", "mpt"):  # their feed-forward is always four times as wide as the model
            layer = replace(layer, feed_forward=replace(layer.feed_forward, width=4 * SIZES.width))
        if architecture == "deepseek-v2" and isinstance(layer.feed_forward, Experts):
            # llama.cpp chooses groups of experts as DeepSeek-V3 does, by their two best ones
            experts = layer.feed_forward
            layer = replace(layer, feed_forward=replace(experts, router=replace(experts.router, groups=None)))
        layers.append(replace(layer, attention=attention))
    return replace(config, decoder=replace(config.decoder, layers=tuple(layers)))


def write_toy(path, network, architecture, tokenizer=None, file_type="f16"):
    """Write a network as this architecture, also if another one could express it."""
    row = "bert" if architecture in STORED_AS_BERT else ROWS.get(architecture, architecture)
    with mock.patch.object(gguf_save, "GGUF_ARCHITECTURES", {row: GGUF_ARCHITECTURES[row]}):
        gguf_save.save_gguf(path, network, tokenizer, file_type=file_type)


def toy_network(architecture):
    """Return a network whose matrices have only values of float16."""
    return half_precision_network(toy_config(architecture), architecture)


def half_precision_network(config, architecture):
    """Return a network with random weights that float16 can represent."""
    torch.manual_seed(0)
    network = Transformer(config).eval()
    redraw(network)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if architecture.startswith(("t5", "umt5")) and name.endswith("query.weight"):
                parameter *= 0.25  # T5 does not scale scores: llama.cpp's rounding would change large ones too much
            parameter.copy_(parameter.half().float())
    return network


def longrope(original_context):
    """Return a LongRoPE scaling for the heads of our toys."""
    pairs = range(SIZES.head_width // 2)
    return LongRopeScaling(
        short_factors=tuple(1 + 0.25 * pair for pair in pairs),
        long_factors=tuple(2.0 + pair for pair in pairs),
        original_context=original_context,
        attention_factor=1.125,  # metadata holds it in float32
    )


def with_scaling(config, scaling):
    """Return a config with this rotary scaling in all layers, and no windows."""
    layers = []
    for layer in config.decoder.layers:
        position = replace(layer.attention.position, scaling=scaling)
        layers.append(replace(layer, attention=replace(layer.attention, pattern=Causal(), position=position)))
    return replace(config, decoder=replace(config.decoder, layers=tuple(layers)))


def longrope_network(original_context, context):
    """Return a small Phi-3 with LongRoPE."""
    config = with_scaling(toy_config("phi3"), longrope(original_context))
    return half_precision_network(replace(config, context=context), "phi3")
