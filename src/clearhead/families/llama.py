"""LLaMA 1, 2, 3, and those built to the same plan: SmolLM2, SmolLM3, Mistral.

RMS norm before each branch, rotary positions in halves, SwiGLU, no biases.
Sources: Touvron et al. 2023a (Table 2), 2023b; Llama 3 (2024, Table 3) and model cards; Jiang et al. 2023; the
config.json of each release. GGUF files of these keep the rotary rows interleaved: see gguf.py.
"""

from collections.abc import Callable
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
from clearhead.families.family import Family, grouped_of, narrow, said_whole
from clearhead.families.names import LAYER, Interleaved, Table
from clearhead.families.rope import read_rope, write_rope
from clearhead.families.settings import ACTIVATION_NAMES_BACK, Settings
from clearhead.families.trunk import TRUNK, check_heads, language_model, write_grouped, write_sizes


def llama(
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
    """`rotated` says for each layer whether it has positions (SmolLM3); None: all have."""
    attention = GroupedAttention(
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_width=width // num_heads if head_width is None else head_width,
        position=rope,
        pattern=SlidingWindow(size=window) if window else Causal(),
        input_bias=attention_bias,
        output_bias=attention_bias,
    )
    unplaced = replace(attention, position=NoPosition())
    inner = FeedForward(width=feed_forward, activation=activation, gated=True, bias=feed_forward_bias)
    return language_model(
        width=width,
        context=context,
        vocab_size=vocab_size,
        attentions=[attention if turns else unplaced for turns in rotated or (True,) * num_layers],
        feed_forwards=[inner] * num_layers,
        norm=RmsNorm(epsilon=epsilon),
        head=Head(tied=tied),
    )


def llama2(
    width: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    feed_forward: int,
    *,
    context: int = 4096,
    epsilon: float = 1e-5,
) -> Callable[[], ModelConfig]:
    return lambda: llama(
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        feed_forward=feed_forward,
        vocab_size=32000,
        context=context,
        rope=Rope(),
        epsilon=epsilon,
    )


def llama1(width: int, num_layers: int, num_heads: int, feed_forward: int) -> Callable[[], ModelConfig]:
    return llama2(width, num_layers, num_heads, num_heads, feed_forward, context=2048, epsilon=1e-6)


def llama3(
    width: int,
    num_layers: int,
    num_heads: int,
    feed_forward: int,
    *,
    factor: float | None = 8.0,
    tied: bool = False,
) -> Callable[[], ModelConfig]:
    scaling = None
    if factor is not None:
        scaling = Llama3Scaling(
            factor=factor, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=8192
        )
    return lambda: llama(
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        feed_forward=feed_forward,
        vocab_size=128256,
        context=131072 if scaling else 8192,
        rope=Rope(theta=500000.0, scaling=scaling),
        tied=tied,
    )


def smollm2(
    width: int, num_layers: int, num_heads: int, num_kv_heads: int, feed_forward: int, theta: float = 100000.0
) -> Callable[[], ModelConfig]:
    return lambda: llama(
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        feed_forward=feed_forward,
        vocab_size=49152,
        context=8192,
        rope=Rope(theta=theta),
        tied=True,
    )


def smollm3() -> ModelConfig:
    return llama(
        width=2048,
        num_layers=36,
        num_heads=16,
        num_kv_heads=4,
        feed_forward=11008,
        vocab_size=128256,
        context=65536,
        rope=Rope(theta=5000000.0),
        epsilon=1e-6,
        tied=True,
        rotated=tuple((number + 1) % 4 != 0 for number in range(36)),
    )


def mistral(window: int | None, theta: float, vocab_size: int = 32000) -> Callable[[], ModelConfig]:
    return lambda: llama(
        width=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        feed_forward=14336,
        vocab_size=vocab_size,
        context=32768,
        rope=Rope(theta=theta),
        window=window,
    )


PRESETS = {
    "llama-7b": llama1(4096, 32, 32, 11008),
    "llama-13b": llama1(5120, 40, 40, 13824),
    "llama-30b": llama1(6656, 60, 52, 17920),
    "llama-65b": llama1(8192, 80, 64, 22016),
    "llama-2-7b": llama2(4096, 32, 32, 32, 11008),
    "llama-2-13b": llama2(5120, 40, 40, 40, 13824),
    "llama-2-70b": llama2(8192, 80, 64, 8, 28672),
    "llama-3-8b": llama3(4096, 32, 32, 14336, factor=None),
    "llama-3-70b": llama3(8192, 80, 64, 28672, factor=None),
    "llama-3.1-8b": llama3(4096, 32, 32, 14336),
    "llama-3.1-70b": llama3(8192, 80, 64, 28672),
    "llama-3.1-405b": llama3(16384, 126, 128, 53248),
    "llama-3.2-1b": llama3(2048, 16, 32, 8192, factor=32.0, tied=True),
    "llama-3.2-3b": llama3(3072, 28, 24, 8192, factor=32.0, tied=True),
    "llama-3.3-70b": llama3(8192, 80, 64, 28672),
    "smollm2-135m": smollm2(576, 30, 9, 3, 1536),
    "smollm2-360m": smollm2(960, 32, 15, 5, 2560),
    "smollm2-1.7b": smollm2(2048, 24, 32, 32, 8192, theta=130000.0),
    "smollm3-3b": smollm3,
    "mistral-7b": mistral(4096, 10000.0),
    "mistral-7b-v0.2": mistral(None, 1000000.0),
    "mistral-7b-v0.3": mistral(None, 1000000.0, vocab_size=32768),
}


# --- transformers' words

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "smollm3": "SmolLM3ForCausalLM"}
# What a key that is not there means, where transformers' classes differ from LLaMA's; null means none
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


def read(settings: Settings) -> ModelConfig:
    kind = settings.text("model_type")
    settings = Settings({**DEFAULTS[kind], **settings.data}, settings.where)
    num_layers, num_heads = settings.whole("num_hidden_layers"), settings.whole("num_attention_heads", at_least=1)
    context = settings.whole("max_position_embeddings")
    biased = kind != "mistral"  # in transformers without biases, whatever config.json says
    return llama(
        width=settings.whole("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=settings.whole("num_key_value_heads", num_heads),
        head_width=settings.whole("head_dim", settings.whole("hidden_size") // num_heads),
        feed_forward=settings.whole("intermediate_size"),
        vocab_size=settings.whole("vocab_size"),
        context=context,
        rope=read_rope(settings, context),
        epsilon=settings.number("rms_norm_eps", 1e-6),
        tied=settings.flag("tie_word_embeddings", False),
        window=settings.whole("sliding_window", 0) if kind == "mistral" else None,
        rotated=read_rotated(settings, num_layers) if kind == "smollm3" else None,
        activation=settings.activation("hidden_act", "silu"),
        attention_bias=biased and settings.flag("attention_bias", False),
        feed_forward_bias=biased and settings.flag("mlp_bias", False),
    )


def read_rotated(settings: Settings, num_layers: int) -> tuple[bool, ...]:
    """In `no_rope_layers` 1 means: has positions."""
    settings.refuse("use_sliding_window", False)
    every = settings.whole("no_rope_layer_interval", 4, at_least=1)
    given = settings.per_layer("no_rope_layers", num_layers) or [(n + 1) % every for n in range(num_layers)]
    return tuple(bool(flag) for flag in given)


def write(config: ModelConfig) -> dict[str, Any]:
    stack = narrow(Stack, config.decoder)
    attentions, inner = grouped_of(stack), narrow(FeedForward, stack.layers[0].feed_forward)
    rotated = [isinstance(attention.position, Rope) for attention in attentions]
    ropes = [attention.position for attention in attentions if isinstance(attention.position, Rope)]
    kind, more = "llama", dict[str, Any]()
    if isinstance(attentions[0].pattern, SlidingWindow):
        kind, more = "mistral", {"sliding_window": attentions[0].pattern.size}
    elif not all(rotated):
        kind, more = "smollm3", {"no_rope_layers": [int(turns) for turns in rotated], "use_sliding_window": False}
    else:
        check_heads(config, attentions[0].num_heads)
    data = write_sizes(config) | write_grouped(attentions[0]) | more
    data |= {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        "intermediate_size": inner.width,
        "rope_parameters": write_rope(ropes[0]) if ropes else None,
        "hidden_act": ACTIVATION_NAMES_BACK[inner.activation],
        "mlp_bias": inner.bias,
    }
    return said_whole(data, config, read)


NAMES: Table = {
    **TRUNK,
    "model.layers.{layer}.input_layernorm.weight": f"{LAYER}.attention_residual.norm.weight",
    "model.layers.{layer}.post_attention_layernorm.weight": f"{LAYER}.feed_forward_residual.norm.weight",
}
# Meta's own names, also of llama2.c files: rotary pairs are neighbours
META_NAMES: Table = {
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
COPIES = {"lm_head.weight": "model.embed_tokens.weight"}
DROPPED = (
    r".*\.rotary_emb\.inv_freq",  # recomputed from the config
    r"(model\.)?(vision_tower|vision_model|multi_modal_projector)\..*",  # of a model that also sees images
)

FAMILY = Family(
    name="llama",
    presets=PRESETS,
    model_types=tuple(ARCHITECTURES),
    read=read,
    write=write,
    names=NAMES,
    prefix="model.",
    copies=COPIES,
    dropped=DROPPED,
)
