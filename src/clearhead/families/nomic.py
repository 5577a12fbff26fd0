"""Nomic BERT: BERT with rotary positions and SwiGLU, without biases in its layers (Nussbaum et al. 2024, §3).

The releases (nomic-embed-text-v1 and v1.5) name their sizes as GPT-2 does; transformers has BERT's names.
"""

from typing import Any

from clearhead.architecture import (
    Bidirectional,
    Classifier,
    Embedding,
    FeedForward,
    Head,
    HeadTransform,
    Layer,
    LayerNorm,
    ModelConfig,
    Rope,
    Stack,
)
from clearhead.families.encoder_style import (
    ENCODER_LAYER,
    IGNORED_TENSORS,
    EncoderClasses,
    add_heads,
    adjust_heads,
    parameter_names,
    write_heads,
)
from clearhead.families.family import Family, require_round_trip, require_type
from clearhead.families.gpt_style import multi_head_attention, stack_parts
from clearhead.families.rope import read_rope, write_rope
from clearhead.families.settings import NAMES_BY_ACTIVATION, Settings
from clearhead.families.tensor_rules import Fused, NameTable

_OLD_NAMES = {  # of the releases -> of transformers
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
_OLD_CHOICES = {"prenorm": False, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "qkv_proj_bias": False}
_OLD_CHOICES |= {"mlp_fc1_bias": False, "mlp_fc2_bias": False, "use_rms_norm": False, "parallel_block": False}


def _classes(config: ModelConfig) -> EncoderClasses:
    parts = stack_parts(config.encoder)
    return EncoderClasses(
        name="NomicBert",
        language=Head(bias=True, transform=HeadTransform(activation=parts.feed_forward.activation, norm=parts.norm)),
        sequence=Classifier(num_labels=1, reads="pooled"),
        poolers=("ForSequenceClassification",),
        language_tensors="cls.predictions.",
    )


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes."""
    settings.allow_only("tie_word_embeddings", True)
    for name, value in _OLD_CHOICES.items():
        settings.allow_only(name, value)
    settings.allow_only("activation_function", "swiglu")
    old = {name: settings.data[key] for key, name in _OLD_NAMES.items() if key in settings and name not in settings}
    settings = Settings({**settings.data, **old}, settings.where)
    width, num_heads = settings.integer("hidden_size"), settings.integer("num_attention_heads", at_least=1)
    settings.allow_only("head_dim", width // num_heads)
    context = settings.integer("max_position_embeddings", 2048)
    norm = LayerNorm(epsilon=settings.number("layer_norm_eps", 1e-12))
    layer = Layer(
        attention=multi_head_attention(
            width,
            num_heads,
            input_bias=False,
            output_bias=False,
            position=read_rope(settings, context, theta=1000.0),
            pattern=Bidirectional(),
        ),
        feed_forward=FeedForward(
            width=settings.integer("intermediate_size"),
            activation=settings.activation("hidden_act", "silu"),
            gated=True,
        ),
        norm=norm,
        placement="post",
    )
    embedding = Embedding(
        vocab_size=settings.integer("vocab_size"), num_token_types=settings.integer("type_vocab_size", 2), norm=norm
    )
    stack = Stack(embedding=embedding, layers=(layer,) * settings.integer("num_hidden_layers"))
    config = ModelConfig(width=width, context=context, encoder=stack)
    return add_heads(config, _classes(config), settings)


def adjust_config(config: ModelConfig, tensor_names: set[str]) -> ModelConfig:
    """Give the config the head and the pooler that the checkpoint has, whichever class config.json names."""
    return adjust_heads(config, _classes(config), tensor_names)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    parts = stack_parts(config.encoder)
    data = {
        "model_type": "nomic_bert",
        "hidden_size": config.width,
        "num_hidden_layers": len(parts.stack.layers),
        "num_attention_heads": parts.attentions[0].num_heads,
        "intermediate_size": parts.feed_forward.width,
        "vocab_size": config.vocab_size,
        "type_vocab_size": parts.stack.token_embedding.num_token_types,
        "max_position_embeddings": config.context,
        "hidden_act": NAMES_BY_ACTIVATION[parts.feed_forward.activation],
        "layer_norm_eps": parts.norm.epsilon,
        "rope_parameters": write_rope(require_type(Rope, parts.attentions[0].position)),
    }
    return require_round_trip(data | write_heads(config, _classes(config)), config, read_config)


_BASE = {"n_embd": 768, "n_head": 12, "n_inner": 3072, "n_layer": 12, "n_positions": 8192, "vocab_size": 30528}
PRESETS = {"nomic-embed-v1.5": lambda: read_config(Settings(_BASE, "nomic_bert"))}

_LAYER = "nomic_bert.encoder.layers.{layer}"
NAMES: NameTable = {
    "nomic_bert.embeddings.word_embeddings.weight": "encoder.embedding.tokens.weight",
    "nomic_bert.embeddings.token_type_embeddings.weight": "encoder.embedding.types.weight",
    **parameter_names("nomic_bert.", "encoder.embedding.", {"emb_ln": "norm"}),
    f"{_LAYER}.attn.Wqkv.weight": Fused(
        tuple(f"{ENCODER_LAYER}.attention.{part}.weight" for part in ("query", "key", "value"))
    ),
    f"{_LAYER}.attn.out_proj.weight": f"{ENCODER_LAYER}.attention.output.weight",
    f"{_LAYER}.mlp.fc11.weight": f"{ENCODER_LAYER}.feed_forward.up.weight",
    f"{_LAYER}.mlp.fc12.weight": f"{ENCODER_LAYER}.feed_forward.gate.weight",
    f"{_LAYER}.mlp.fc2.weight": f"{ENCODER_LAYER}.feed_forward.down.weight",
    **parameter_names(f"{_LAYER}.", f"{ENCODER_LAYER}.", {"norm1": "attention_residual.norm"}),
    **parameter_names(f"{_LAYER}.", f"{ENCODER_LAYER}.", {"norm2": "feed_forward_residual.norm"}),
    **parameter_names("nomic_bert.", "", {"pooler.dense": "pooler"}),
    **parameter_names("cls.predictions.transform.", "head.transform.", {"dense": "dense", "layer_norm": "norm"}),
    "cls.predictions.bias": "head.bias",
    **parameter_names("", "", {"classifier": "classifier.scores"}),
}
FAMILY = Family(
    name="nomic",
    presets=PRESETS,
    model_types=("nomic_bert",),
    read_config=read_config,
    padding_id=0,  # transformers takes no null
    write_config=write_config,
    tensor_names=NAMES,
    base_model_prefix="nomic_bert.",
    duplicates={
        "cls.predictions.decoder.weight": "nomic_bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    ignored_tensors=IGNORED_TENSORS,
    adjust_config=adjust_config,
)
