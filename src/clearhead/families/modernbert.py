"""ModernBERT: a pre-norm encoder with rotary positions and GeGLU; two of three layers attend to a window only.

The first layer reads the normalized embeddings without a norm of its own. Layers with a window have their own theta.
Sources: Warner et al. 2024, §2.1 and table 4; the config.json of each release.
"""

from typing import Any

from clearhead.architecture import (
    Bidirectional,
    CenteredWindow,
    Classifier,
    Embedding,
    FeedForward,
    GroupedAttention,
    Head,
    HeadTransform,
    Layer,
    LayerNorm,
    ModelConfig,
    Rope,
    Stack,
)
from clearhead.families.encoder_style import ENCODER_LAYER, EncoderClasses, add_heads, adjust_heads, write_heads
from clearhead.families.family import Family, Preset, look_up_layer_type, require_round_trip, require_type
from clearhead.families.gpt_style import multi_head_attention, stack_parts
from clearhead.families.rope import read_rope, rope_parameters_of_type, write_rope
from clearhead.families.settings import NAMES_BY_ACTIVATION, Settings
from clearhead.families.tensor_rules import Fused, NameTable, TensorRule

_FULL, _WINDOW = "full_attention", "sliding_attention"
_THETAS = {_FULL: ("global_rope_theta", 160_000.0), _WINDOW: ("local_rope_theta", 10_000.0)}


def _classes(settings: Settings, norm: LayerNorm) -> EncoderClasses:
    transform = HeadTransform(
        activation=settings.activation("classifier_activation", "gelu"),
        norm=norm,
        bias=settings.boolean("classifier_bias", False),
    )
    pooling = settings.string("classifier_pooling", "cls")
    reads = look_up_layer_type({"cls": "first", "mean": "mean"}, pooling, settings)
    return EncoderClasses(
        name="ModernBert",
        language=Head(bias=settings.boolean("decoder_bias", True), transform=transform),
        sequence=Classifier(num_labels=1, reads="first" if reads == "first" else "mean", transform=transform),
        tokens=Classifier(num_labels=1, reads="tokens", transform=transform),
    )


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes."""
    settings.allow_only("tie_word_embeddings", True)
    width, num_layers = settings.integer("hidden_size"), settings.integer("num_hidden_layers")
    context = settings.integer("max_position_embeddings", 8192)
    norm = LayerNorm(epsilon=settings.number("norm_eps", 1e-5), bias=settings.boolean("norm_bias", False))
    attentions = _read_attentions(settings, width, context)
    every = settings.integer("global_attn_every_n_layers", 3, at_least=1)
    types = settings.per_layer("layer_types", num_layers) or [
        _WINDOW if i % every else _FULL for i in range(num_layers)
    ]
    dense = FeedForward(
        width=settings.integer("intermediate_size"),
        activation=settings.activation("hidden_activation", "gelu"),
        gated=True,
        bias=settings.boolean("mlp_bias", False),
    )
    layers = [
        Layer(
            attention=look_up_layer_type(attentions, name, settings),
            feed_forward=dense,
            norm=norm,
            attention_norm=number > 0,
        )
        for number, name in enumerate(types)
    ]
    embedding = Embedding(vocab_size=settings.integer("vocab_size"), norm=norm)
    stack = Stack(embedding=embedding, layers=tuple(layers), final_norm=norm)
    return add_heads(ModelConfig(width=width, context=context, encoder=stack), _classes(settings, norm), settings)


def _read_attentions(settings: Settings, width: int, context: int) -> dict[str, GroupedAttention]:
    """Return the attention of each layer type."""
    bias = settings.boolean("attention_bias", False)
    reach = settings.integer("local_attention", 128, at_least=2) // 2
    settings.allow_only("sliding_window", reach)  # another name of half the window, which transformers reads last
    settings.allow_only("rope_scaling")  # transformers would merge it into the entry of each layer type
    attentions = {}
    for name, (old_name, theta) in _THETAS.items():
        nested = rope_parameters_of_type(settings, name, merge_scaling=False).data
        theta = settings.number(old_name, theta)
        rope = read_rope(Settings({"rope_parameters": nested}, settings.where), context, theta)
        attentions[name] = multi_head_attention(
            width,
            settings.integer("num_attention_heads"),
            input_bias=bias,
            output_bias=bias,
            position=rope,
            pattern=Bidirectional() if name == _FULL else CenteredWindow(reach=reach),
        )
    return attentions


def adjust_config(config: ModelConfig, tensor_names: set[str]) -> ModelConfig:
    """Keep the heads of the class that config.json names; a language head always has its own tensors."""
    if config.head is not None and not any(name.startswith("head.") for name in tensor_names):
        return adjust_heads(config, EncoderClasses(name="", language=config.head, sequence=_ANY), tensor_names)
    return config


_ANY = Classifier(num_labels=1, reads="first")


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    parts = stack_parts(config.encoder)
    by_type = {_WINDOW if isinstance(a.pattern, CenteredWindow) else _FULL: a for a in parts.attentions}
    first = parts.attentions[0]
    windows = [a.pattern.reach for a in parts.attentions if isinstance(a.pattern, CenteredWindow)]
    data: dict[str, Any] = {
        "model_type": "modernbert",
        "hidden_size": config.width,
        "num_hidden_layers": len(parts.stack.layers),
        "num_attention_heads": first.num_heads,
        "intermediate_size": parts.feed_forward.width,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context,
        "hidden_activation": NAMES_BY_ACTIVATION[parts.feed_forward.activation],
        "norm_eps": parts.norm.epsilon,
        "norm_bias": parts.norm.bias,
        "attention_bias": first.input_bias,
        "mlp_bias": parts.feed_forward.bias,
        "local_attention": 2 * windows[0] if windows else 128,
        "layer_types": [_WINDOW if isinstance(a.pattern, CenteredWindow) else _FULL for a in parts.attentions],
        "rope_parameters": {
            name: write_rope(require_type(Rope, by_type[name].position)) if name in by_type else None
            for name in _THETAS
        },
    }
    data["rope_parameters"] = {name: rope for name, rope in data["rope_parameters"].items() if rope}
    transform = config.head.transform if config.head else config.classifier.transform if config.classifier else None
    if transform is not None:
        data["classifier_activation"] = NAMES_BY_ACTIVATION[transform.activation]
        data["classifier_bias"] = transform.bias
    if config.head is not None:
        data["decoder_bias"] = config.head.bias
    if config.classifier is not None:
        data["classifier_pooling"] = "mean" if config.classifier.reads == "mean" else "cls"
    data |= write_heads(config, _classes(Settings(data, "modernbert"), parts.norm))
    return require_round_trip(data, config, read_config)


def _preset(width: int, num_layers: int, num_heads: int, feed_forward: int) -> Preset:
    data = {"hidden_size": width, "num_hidden_layers": num_layers, "num_attention_heads": num_heads}
    settings = data | {"intermediate_size": feed_forward, "vocab_size": 50368}
    return lambda: read_config(Settings(settings | {"architectures": ["ModernBertForMaskedLM"]}, "modernbert"))


PRESETS = {"modernbert-base": _preset(768, 22, 12, 1152), "modernbert-large": _preset(1024, 28, 16, 2624)}


def _module_names() -> dict[str, str | TensorRule | tuple[str | TensorRule, ...]]:
    names: dict[str, str | TensorRule | tuple[str | TensorRule, ...]] = {}
    layer = "model.layers.{layer}"
    for leaf in ("weight", "bias"):
        names |= {
            f"model.embeddings.norm.{leaf}": f"encoder.embedding.norm.{leaf}",
            f"{layer}.attn_norm.{leaf}": f"{ENCODER_LAYER}.attention_residual.norm.{leaf}",
            f"{layer}.attn.Wqkv.{leaf}": Fused(
                tuple(f"{ENCODER_LAYER}.attention.{part}.{leaf}" for part in ("query", "key", "value"))
            ),
            f"{layer}.attn.Wo.{leaf}": f"{ENCODER_LAYER}.attention.output.{leaf}",
            f"{layer}.mlp_norm.{leaf}": f"{ENCODER_LAYER}.feed_forward_residual.norm.{leaf}",
            f"{layer}.mlp.Wi.{leaf}": Fused(
                tuple(f"{ENCODER_LAYER}.feed_forward.{part}.{leaf}" for part in ("gate", "up"))
            ),
            f"{layer}.mlp.Wo.{leaf}": f"{ENCODER_LAYER}.feed_forward.down.{leaf}",
            f"model.final_norm.{leaf}": f"encoder.final_norm.{leaf}",
            f"head.dense.{leaf}": (f"head.transform.dense.{leaf}", f"classifier.transform.dense.{leaf}"),
            f"head.norm.{leaf}": (f"head.transform.norm.{leaf}", f"classifier.transform.norm.{leaf}"),
            f"classifier.{leaf}": f"classifier.scores.{leaf}",
        }
    return names


NAMES: NameTable = {
    "model.embeddings.tok_embeddings.weight": "encoder.embedding.tokens.weight",
    **_module_names(),
    "decoder.bias": "head.bias",
}
FAMILY = Family(
    name="modernbert",
    presets=PRESETS,
    model_types=("modernbert",),
    read_config=read_config,
    write_config=write_config,
    tensor_names=NAMES,
    base_model_prefix="model.",
    duplicates={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    adjust_config=adjust_config,
)
