"""LLaMA 1, 2 and 3, and models of the same design: SmolLM2, SmolLM3, Mistral.

Pre-norm with RMS norms, rotary positions with pairs in halves, SwiGLU, no biases.
Sources: Touvron et al. 2023a (Table 2), 2023b; Llama 3 (2024, Table 3) and model cards; Jiang et al. 2023; the
config.json of each release. GGUF files of these models store rotary pairs interleaved: see gguf.py.
"""

from dataclasses import replace
from typing import Any

from clearhead.architecture import (
    Activation,
    Causal,
    FeedForward,
    GroupedAttention,
    Head,
    Llama3Scaling,
    ModelConfig,
    NoPosition,
    RmsNorm,
    Rope,
    SlidingWindow,
    Stack,
)
from clearhead.families.family import Family, Preset, grouped_attentions, require_round_trip, require_type
from clearhead.families.llama_style import (
    DUPLICATES,
    IGNORED_TENSORS,
    PRE_NORM_NAMES,
    decoder_only_config,
    require_divisible_width,
    write_attention,
    write_sizes,
)
from clearhead.families.rope import read_rope, write_rope
from clearhead.families.settings import NAMES_BY_ACTIVATION, Settings
from clearhead.families.tensor_rules import LAYER, Interleaved, NameTable


def llama_config(
    *,
    width: int,
    num_layers: int,
    num_heads: int,
    feed_forward: int,
    vocab_size: int,
    context: int,
    rope: Rope,
    num_kv_heads: int | None = None,
    head_width: int | None = None,
    epsilon: float = 1e-5,
    tied: bool = False,
    window: int | None = None,
    rotated: tuple[bool, ...] | None = None,
    activation: Activation = "silu",
    attention_bias: bool = False,
    feed_forward_bias: bool = False,
) -> ModelConfig:
    """Return a config; `rotated` tells for each layer whether it has rotary positions (SmolLM3); None: all have."""
    attention = GroupedAttention(
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_width=width // num_heads if head_width is None else head_width,
        position=rope,
        pattern=SlidingWindow(size=window) if window else Causal(),
        input_bias=attention_bias,
        output_bias=attention_bias,
    )
    without_position = replace(attention, position=NoPosition())
    dense = FeedForward(width=feed_forward, activation=activation, gated=True, bias=feed_forward_bias)
    return decoder_only_config(
        width=width,
        context=context,
        vocab_size=vocab_size,
        attentions=[attention if rotates else without_position for rotates in rotated or (True,) * num_layers],
        feed_forwards=[dense] * num_layers,
        norm=RmsNorm(epsilon=epsilon),
        head=Head(tied=tied),
    )


def _llama_preset(width: int, num_layers: int, num_heads: int, feed_forward: int, **options: Any) -> Preset:
    """Return a preset; `options` go to llama_config."""
    return lambda: llama_config(
        width=width, num_layers=num_layers, num_heads=num_heads, feed_forward=feed_forward, **options
    )


def _llama3_rope(factor: float) -> Rope:
    """Return the rotary positions of Llama 3.1 and later, which extend a context of 8192 tokens."""
    scaling = Llama3Scaling(factor=factor, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=8192)
    return Rope(theta=500000.0, scaling=scaling)


_LLAMA1: dict[str, Any] = {"vocab_size": 32000, "context": 2048, "rope": Rope(), "epsilon": 1e-6}
_LLAMA2: dict[str, Any] = {"vocab_size": 32000, "context": 4096, "rope": Rope()}
LLAMA3: dict[str, Any] = {"vocab_size": 128256, "context": 8192, "rope": Rope(theta=500000.0), "num_kv_heads": 8}
_LLAMA3_1 = LLAMA3 | {"context": 131072, "rope": _llama3_rope(8.0)}
_LLAMA3_2 = LLAMA3 | {"context": 131072, "rope": _llama3_rope(32.0), "tied": True}
_SMOLLM2: dict[str, Any] = {"vocab_size": 49152, "context": 8192, "rope": Rope(theta=100000.0), "tied": True}
_SMOLLM3: dict[str, Any] = {
    "num_kv_heads": 4,
    "vocab_size": 128256,
    "context": 65536,
    "rope": Rope(theta=5000000.0),
    "epsilon": 1e-6,
    "tied": True,
    "rotated": tuple((index + 1) % 4 != 0 for index in range(36)),
}
MISTRAL: dict[str, Any] = {"vocab_size": 32000, "context": 32768, "rope": Rope(theta=1000000.0), "num_kv_heads": 8}
_MISTRAL_V0_1 = MISTRAL | {"rope": Rope(theta=10000.0), "window": 4096}
PRESETS = {
    "llama-7b": _llama_preset(4096, 32, 32, 11008, **_LLAMA1),
    "llama-13b": _llama_preset(5120, 40, 40, 13824, **_LLAMA1),
    "llama-30b": _llama_preset(6656, 60, 52, 17920, **_LLAMA1),
    "llama-65b": _llama_preset(8192, 80, 64, 22016, **_LLAMA1),
    "llama-2-7b": _llama_preset(4096, 32, 32, 11008, **_LLAMA2),
    "llama-2-13b": _llama_preset(5120, 40, 40, 13824, **_LLAMA2),
    "llama-2-70b": _llama_preset(8192, 80, 64, 28672, num_kv_heads=8, **_LLAMA2),
    "llama-3-8b": _llama_preset(4096, 32, 32, 14336, **LLAMA3),
    "llama-3-70b": _llama_preset(8192, 80, 64, 28672, **LLAMA3),
    "llama-3.1-8b": _llama_preset(4096, 32, 32, 14336, **_LLAMA3_1),
    "llama-3.1-70b": _llama_preset(8192, 80, 64, 28672, **_LLAMA3_1),
    "llama-3.1-405b": _llama_preset(16384, 126, 128, 53248, **_LLAMA3_1),
    "llama-3.2-1b": _llama_preset(2048, 16, 32, 8192, **_LLAMA3_2),
    "llama-3.2-3b": _llama_preset(3072, 28, 24, 8192, **_LLAMA3_2),
    "llama-3.3-70b": _llama_preset(8192, 80, 64, 28672, **_LLAMA3_1),
    "smollm2-135m": _llama_preset(576, 30, 9, 1536, num_kv_heads=3, **_SMOLLM2),
    "smollm2-360m": _llama_preset(960, 32, 15, 2560, num_kv_heads=5, **_SMOLLM2),
    "smollm2-1.7b": _llama_preset(2048, 24, 32, 8192, **_SMOLLM2 | {"rope": Rope(theta=130000.0)}),
    "smollm3-3b": _llama_preset(2048, 36, 16, 11008, **_SMOLLM3),
    "mistral-7b": _llama_preset(4096, 32, 32, 14336, **_MISTRAL_V0_1),
    "mistral-7b-v0.2": _llama_preset(4096, 32, 32, 14336, **MISTRAL),
    "mistral-7b-v0.3": _llama_preset(4096, 32, 32, 14336, **MISTRAL | {"vocab_size": 32768}),
}


# --- config.json

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "smollm3": "SmolLM3ForCausalLM"}
# What an absent setting means to transformers' classes, as far as it depends on the class; null means None.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
    "smollm3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    },
}


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes."""
    model_type = settings.string("model_type")
    settings = Settings({**DEFAULTS[model_type], **settings.data}, settings.where)
    num_layers, num_heads = settings.integer("num_hidden_layers"), settings.integer("num_attention_heads", at_least=1)
    context = settings.integer("max_position_embeddings")
    may_have_bias = model_type != "mistral"  # transformers' class has none, whatever config.json contains
    return llama_config(
        width=settings.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=settings.integer("num_key_value_heads", num_heads),
        head_width=settings.integer("head_dim", settings.integer("hidden_size") // num_heads),
        feed_forward=settings.integer("intermediate_size"),
        vocab_size=settings.integer("vocab_size"),
        context=context,
        rope=read_rope(settings, context),
        epsilon=settings.number("rms_norm_eps", 1e-6),
        tied=settings.boolean("tie_word_embeddings", False),
        window=settings.integer("sliding_window", 0) if model_type == "mistral" else None,
        rotated=read_rotated(settings, num_layers) if model_type == "smollm3" else None,
        activation=settings.activation("hidden_act", "silu"),
        attention_bias=may_have_bias and settings.boolean("attention_bias", False),
        feed_forward_bias=may_have_bias and settings.boolean("mlp_bias", False),
    )


def read_rotated(settings: Settings, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has rotary positions: in `no_rope_layers`, 1 means that it has."""
    settings.allow_only("use_sliding_window", False)
    settings.allow_only("layer_types", ["full_attention"] * num_layers)
    every = settings.integer("no_rope_layer_interval", 4, at_least=1)
    flags = settings.per_layer("no_rope_layers", num_layers) or [(index + 1) % every for index in range(num_layers)]
    return tuple(bool(flag) for flag in flags)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    stack = require_type(Stack, config.decoder)
    attentions, dense = grouped_attentions(stack), require_type(FeedForward, stack.layers[0].feed_forward)
    rotated = [isinstance(attention.position, Rope) for attention in attentions]
    ropes = [attention.position for attention in attentions if isinstance(attention.position, Rope)]
    model_type, more = "llama", dict[str, Any]()
    if isinstance(attentions[0].pattern, SlidingWindow):
        model_type, more = "mistral", {"sliding_window": attentions[0].pattern.size}
    elif not all(rotated):
        model_type = "smollm3"
        more = {"no_rope_layers": [int(rotates) for rotates in rotated], "use_sliding_window": False}
    else:
        require_divisible_width(config, attentions[0].num_heads)
    data = write_sizes(config) | write_attention(attentions[0]) | more
    data |= {
        "model_type": model_type,
        "architectures": [ARCHITECTURES[model_type]],
        "intermediate_size": dense.width,
        "rope_parameters": write_rope(ropes[0]) if ropes else None,
        "hidden_act": NAMES_BY_ACTIVATION[dense.activation],
        "mlp_bias": dense.bias,
    }
    return require_round_trip(data, config, read_config)


# The names in Meta's own checkpoints and in llama2.c files, whose rotary pairs are neighboring rows
META_LLAMA_NAMES: NameTable = {
    "tok_embeddings.weight": "decoder.embedding.tokens.weight",
    "layers.{layer}.attention.wq.weight": Interleaved((f"{LAYER}.attention.query.weight",)),
    "layers.{layer}.attention.wk.weight": Interleaved((f"{LAYER}.attention.key.weight",)),
    "layers.{layer}.attention.wv.weight": f"{LAYER}.attention.value.weight",
    "layers.{layer}.attention.wo.weight": f"{LAYER}.attention.output.weight",
    "layers.{layer}.attention_norm.weight": f"{LAYER}.attention_residual.norm.weight",
    "layers.{layer}.ffn_norm.weight": f"{LAYER}.feed_forward_residual.norm.weight",
    "layers.{layer}.feed_forward.w1.weight": f"{LAYER}.feed_forward.gate.weight",
    "layers.{layer}.feed_forward.w2.weight": f"{LAYER}.feed_forward.down.weight",
    "layers.{layer}.feed_forward.w3.weight": f"{LAYER}.feed_forward.up.weight",
    "norm.weight": "decoder.final_norm.weight",
    "output.weight": "head.weight",
}

FAMILY = Family(
    name="llama",
    presets=PRESETS,
    model_types=tuple(ARCHITECTURES),
    read_config=read_config,
    write_config=write_config,
    tensor_names=PRE_NORM_NAMES,
    base_model_prefix="model.",
    duplicates=DUPLICATES,
    ignored_tensors=IGNORED_TENSORS,
)
