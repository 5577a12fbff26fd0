"""Parts shared by LLaMA and its relatives (Qwen, Gemma, DeepSeek, Llama 4, Grok): config, config.json, tensor names.

config = decoder_only_config(attentions=(attention,) * 4, feed_forwards=(gated_feed_forward(256),) * 4, **sizes)
data = write_sizes(config) | write_attention(attention)   # hidden_size, num_hidden_layers, …, num_attention_heads, …
"""

from collections.abc import Sequence
from typing import Any, Literal

from clearhead.architecture import (
    Activation,
    Embedding,
    Experts,
    FeedForward,
    GroupedAttention,
    Head,
    LatentAttention,
    Layer,
    ModelConfig,
    RmsNorm,
    Stack,
)
from clearhead.errors import ClearheadError
from clearhead.families.family import require_type
from clearhead.families.settings import NAMES_BY_ACTIVATION
from clearhead.families.tensor_rules import LAYER, NameTable

# The names that all these families share; the names of the norms depend on where the norms are.
COMMON_NAMES: NameTable = {
    "model.embed_tokens.weight": "decoder.embedding.tokens.weight",
    "model.layers.{layer}.self_attn.q_proj.weight": f"{LAYER}.attention.query.weight",
    "model.layers.{layer}.self_attn.k_proj.weight": f"{LAYER}.attention.key.weight",
    "model.layers.{layer}.self_attn.v_proj.weight": f"{LAYER}.attention.value.weight",
    "model.layers.{layer}.self_attn.o_proj.weight": f"{LAYER}.attention.output.weight",
    "model.layers.{layer}.self_attn.q_proj.bias": f"{LAYER}.attention.query.bias",
    "model.layers.{layer}.self_attn.k_proj.bias": f"{LAYER}.attention.key.bias",
    "model.layers.{layer}.self_attn.v_proj.bias": f"{LAYER}.attention.value.bias",
    "model.layers.{layer}.self_attn.o_proj.bias": f"{LAYER}.attention.output.bias",
    "model.layers.{layer}.mlp.gate_proj.weight": f"{LAYER}.feed_forward.gate.weight",
    "model.layers.{layer}.mlp.up_proj.weight": f"{LAYER}.feed_forward.up.weight",
    "model.layers.{layer}.mlp.down_proj.weight": f"{LAYER}.feed_forward.down.weight",
    "model.layers.{layer}.mlp.gate_proj.bias": f"{LAYER}.feed_forward.gate.bias",
    "model.layers.{layer}.mlp.up_proj.bias": f"{LAYER}.feed_forward.up.bias",
    "model.layers.{layer}.mlp.down_proj.bias": f"{LAYER}.feed_forward.down.bias",
    "model.norm.weight": "decoder.final_norm.weight",
    "lm_head.weight": "head.weight",
}
PRE_NORM_NAMES: NameTable = {
    **COMMON_NAMES,
    "model.layers.{layer}.input_layernorm.weight": f"{LAYER}.attention_residual.norm.weight",
    "model.layers.{layer}.post_attention_layernorm.weight": f"{LAYER}.feed_forward_residual.norm.weight",
}
HEAD_NORM_NAMES: NameTable = {
    "model.layers.{layer}.self_attn.q_norm.weight": f"{LAYER}.attention.query_norm.weight",
    "model.layers.{layer}.self_attn.k_norm.weight": f"{LAYER}.attention.key_norm.weight",
}
# Checkpoints store each expert separately; transformers stacks them when it loads.
EXPERT_NAMES: NameTable = {
    "model.layers.{layer}.mlp.gate.weight": f"{LAYER}.feed_forward.router.weight",
    "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight": f"{LAYER}.feed_forward.gate[{{expert}}]",
    "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight": f"{LAYER}.feed_forward.up[{{expert}}]",
    "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight": f"{LAYER}.feed_forward.down[{{expert}}]",
}
DUPLICATES = {"lm_head.weight": "model.embed_tokens.weight"}
IGNORED_TENSORS = (
    r".*\.rotary_emb\.inv_freq",  # computed from the config
    r"(model\.)?(vision_tower|vision_model|multi_modal_projector)\..*",  # the vision part of a multimodal model
)


def gated_feed_forward(width: int, activation: Activation = "silu") -> FeedForward:
    """Return a gated feed-forward without biases (SwiGLU by default)."""
    return FeedForward(width=width, activation=activation, gated=True)


def decoder_only_config(
    *,
    width: int,
    context: int,
    vocab_size: int,
    attentions: Sequence[GroupedAttention | LatentAttention],
    feed_forwards: Sequence[FeedForward | Experts],
    norm: RmsNorm,
    head: Head,
    placement: Literal["pre", "sandwich"] = "pre",
    embedding_scale: float = 1.0,
) -> ModelConfig:
    """Return a decoder-only config; `attentions` and `feed_forwards` have one entry for each layer."""
    layers = tuple(
        Layer(attention=attention, feed_forward=feed_forward, norm=norm, placement=placement)
        for attention, feed_forward in zip(attentions, feed_forwards, strict=True)
    )
    embedding = Embedding(vocab_size=vocab_size, scale=embedding_scale)
    stack = Stack(embedding=embedding, layers=layers, final_norm=norm)
    return ModelConfig(width=width, context=context, decoder=stack, head=head)


def write_sizes(config: ModelConfig) -> dict[str, Any]:
    """Return the settings of width, depth, vocabulary, context, norm and head."""
    stack, head = require_type(Stack, config.decoder), require_type(Head, config.head)
    return {
        "hidden_size": config.width,
        "num_hidden_layers": len(stack.layers),
        "vocab_size": stack.token_embedding.vocab_size,
        "max_position_embeddings": config.context,
        "rms_norm_eps": require_type(RmsNorm, stack.final_norm).epsilon,
        "tie_word_embeddings": head.tied,
    }


def require_divisible_width(config: ModelConfig, num_heads: int) -> None:
    """Raise ClearheadError if the width is not a multiple of the number of heads.

    transformers requires it for LLaMA, Gemma and DeepSeek-V2, even if `head_dim` is set.
    """
    if config.width % num_heads:
        raise ClearheadError(f"the width is {config.width}; transformers needs a multiple of the {num_heads} heads")


def write_attention(attention: GroupedAttention) -> dict[str, Any]:
    """Return the settings of the heads and their biases."""
    return {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_width,
        "attention_bias": attention.output_bias,
    }


def first_experts(stack: Stack) -> Experts | None:
    """Return the first mixture of experts, or None; in a model of these families all are equal."""
    return next((layer.feed_forward for layer in stack.layers if isinstance(layer.feed_forward, Experts)), None)


def first_feed_forward(stack: Stack) -> FeedForward | None:
    """Return the first dense feed-forward, or None; in a model of these families all are equal."""
    return next((layer.feed_forward for layer in stack.layers if isinstance(layer.feed_forward, FeedForward)), None)


def activation_name(stack: Stack) -> str:
    """Return transformers' name of the activation in the first layer."""
    first = stack.layers[0].feed_forward
    return NAMES_BY_ACTIVATION[first.expert.activation if isinstance(first, Experts) else first.activation]
