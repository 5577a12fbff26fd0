"""GPT-Neo: the design of GPT-3 with unscaled scores and no bias on queries, keys and values.

Sources: Black et al. 2021 (GPT-Neo release) and the config.json of each size.
"""

from typing import Any

from clearhead.architecture import Causal, GroupedAttention, ModelConfig, SlidingWindow
from clearhead.errors import ClearheadError
from clearhead.families.family import Family, Preset, look_up_layer_type, require_round_trip
from clearhead.families.gpt import GPT2_NAMES, GPT2_NAMES_BY_ACTIVATION, gpt_config
from clearhead.families.gpt_style import multi_head_attention, stack_parts
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import LAYER, NameTable

Pattern = Causal | SlidingWindow


def _gpt_neo_attention(width: int, num_heads: int, pattern: Pattern) -> GroupedAttention:
    return multi_head_attention(width, num_heads, input_bias=False, scale=1.0, pattern=pattern)


def _gpt_neo_preset(width: int, num_layers: int, num_heads: int) -> Preset:
    patterns: list[Pattern] = [SlidingWindow(size=256) if index % 2 else Causal() for index in range(num_layers)]
    return lambda: gpt_config(
        width=width,
        attentions=[_gpt_neo_attention(width, num_heads, pattern) for pattern in patterns],
        vocab_size=50257,
        context=2048,
    )


PRESETS = {
    "gpt-neo-125m": _gpt_neo_preset(768, 12, 12),
    "gpt-neo-1.3b": _gpt_neo_preset(2048, 24, 16),
    "gpt-neo-2.7b": _gpt_neo_preset(2560, 32, 20),
}


# --- config.json


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes."""
    width, num_heads = settings.integer("hidden_size"), settings.integer("num_heads")
    patterns = read_patterns(settings, settings.integer("num_layers"))
    return gpt_config(
        width=width,
        attentions=[_gpt_neo_attention(width, num_heads, pattern) for pattern in patterns],
        vocab_size=settings.integer("vocab_size"),
        context=settings.integer("max_position_embeddings"),
        feed_forward=settings.integer("intermediate_size", 4 * width),
        activation=settings.activation("activation_function", "gelu_new"),
        epsilon=settings.number("layer_norm_epsilon", 1e-5),
        tied=settings.boolean("tie_word_embeddings", True),
    )


def read_patterns(settings: Settings, num_layers: int) -> list[Pattern]:
    """Return the attention pattern of each layer.

    `attention_types` is a list of [names, repetitions], such as [[["global", "local"], 12]]. The older list
    `attention_layers` has an entry for each layer and takes precedence.
    """
    window = SlidingWindow(size=settings.integer("window_size", 256))
    patterns: dict[str, Pattern] = {"global": Causal(), "local": window}
    names: list[str] = []
    listed = settings.per_layer("attention_layers", num_layers)
    if listed:
        return [look_up_layer_type(patterns, name, settings) for name in listed]
    for group in settings.array("attention_types"):
        match group:
            case [[*repeated], int(times)] if len(repeated) * times <= num_layers:
                names += [str(name) for name in repeated] * times
    if len(names) != num_layers or not set(names) <= set(patterns):
        raise ClearheadError(
            f"{settings.where}: 'attention_types' must give 'global' or 'local' for each of the {num_layers} layers"
        )
    return [patterns[name] for name in names]


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    parts = stack_parts(config.decoder)
    windows = [attention.pattern.size for attention in parts.attentions if isinstance(attention.pattern, SlidingWindow)]
    names = ["local" if isinstance(attention.pattern, SlidingWindow) else "global" for attention in parts.attentions]
    data = {
        "architectures": ["GPTNeoForCausalLM"],
        "model_type": "gpt_neo",
        "hidden_size": config.width,
        "num_layers": len(parts.stack.layers),
        "num_heads": parts.attentions[0].num_heads,
        "intermediate_size": parts.feed_forward.width,
        "attention_types": [[names, 1]],
        "window_size": windows[0] if windows else 256,
        "max_position_embeddings": config.context,
        "vocab_size": config.vocab_size,
        "activation_function": GPT2_NAMES_BY_ACTIVATION[parts.feed_forward.activation],
        "layer_norm_epsilon": parts.norm.epsilon,
        "tie_word_embeddings": config.head is not None and config.head.tied,
    }
    return require_round_trip(data, config, read_config)


# The names of GPT-2 except for attention; matrices are stored (out, in), although their names are the same.
NAMES: NameTable = {
    **{name: rule for name, rule in GPT2_NAMES.items() if ".attn." not in name},
    "transformer.h.{layer}.attn.attention.q_proj.weight": f"{LAYER}.attention.query.weight",
    "transformer.h.{layer}.attn.attention.k_proj.weight": f"{LAYER}.attention.key.weight",
    "transformer.h.{layer}.attn.attention.v_proj.weight": f"{LAYER}.attention.value.weight",
    "transformer.h.{layer}.attn.attention.out_proj.weight": f"{LAYER}.attention.output.weight",
    "transformer.h.{layer}.attn.attention.out_proj.bias": f"{LAYER}.attention.output.bias",
    "transformer.h.{layer}.mlp.c_fc.weight": f"{LAYER}.feed_forward.up.weight",
    "transformer.h.{layer}.mlp.c_proj.weight": f"{LAYER}.feed_forward.down.weight",
}

FAMILY = Family(
    name="gpt_neo",
    presets=PRESETS,
    model_types=("gpt_neo",),
    read_config=read_config,
    write_config=write_config,
    tensor_names=NAMES,
    base_model_prefix="transformer.",
    duplicates={"lm_head.weight": "transformer.wte.weight"},
    ignored_tensors=(r".*\.attn\.attention\.(masked_)?bias",),  # the mask of each layer, which is computed
)
