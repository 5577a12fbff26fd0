"""What the descendants of LLaMA share, in our words and in transformers': Qwen, Gemma, DeepSeek, Llama 4, Grok.

config = language_model(attentions=(attention,) * 4, feed_forwards=(gated(256),) * 4, **sizes)
data = write_sizes(config) | write_grouped(attention)   # hidden_size, num_hidden_layers, …, num_attention_heads, …
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
from clearhead.families.family import narrow
from clearhead.families.names import LAYER, Table
from clearhead.families.settings import ACTIVATION_NAMES_BACK

TRUNK: Table = {
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
# On disk each expert is apart; transformers joins them when it loads
MIXTURE_NAMES: Table = {
    "model.layers.{layer}.mlp.gate.weight": f"{LAYER}.feed_forward.router.weight",
    "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight": f"{LAYER}.feed_forward.gate[{{expert}}]",
    "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight": f"{LAYER}.feed_forward.up[{{expert}}]",
    "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight": f"{LAYER}.feed_forward.down[{{expert}}]",
}


def gated(width: int, activation: Activation = "silu") -> FeedForward:
    return FeedForward(width=width, activation=activation, gated=True)


def language_model(
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
    """`attentions` and `feed_forwards` name one for each layer; the norm is the same everywhere."""
    layers = tuple(
        Layer(attention=attention, feed_forward=feed_forward, norm=norm, placement=placement)
        for attention, feed_forward in zip(attentions, feed_forwards, strict=True)
    )
    embedding = Embedding(vocab_size=vocab_size, scale=embedding_scale)
    stack = Stack(embedding=embedding, layers=layers, final_norm=norm)
    return ModelConfig(width=width, context=context, decoder=stack, head=head)


def write_sizes(config: ModelConfig) -> dict[str, Any]:
    stack, head = narrow(Stack, config.decoder), narrow(Head, config.head)
    return {
        "hidden_size": config.width,
        "num_hidden_layers": len(stack.layers),
        "vocab_size": stack.embedding.vocab_size,
        "max_position_embeddings": config.context,
        "rms_norm_eps": narrow(RmsNorm, stack.final_norm).epsilon,
        "tie_word_embeddings": head.tied,
    }


def check_heads(config: ModelConfig, num_heads: int) -> None:
    """transformers asks this of LLaMA, Gemma and DeepSeek-V2, though their heads have a width of their own."""
    if config.width % num_heads:
        raise ClearheadError(f"the width is {config.width}; transformers needs a multiple of the {num_heads} heads")


def write_grouped(attention: GroupedAttention) -> dict[str, Any]:
    return {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_width,
        "attention_bias": attention.output_bias,
    }


def experts_of(stack: Stack) -> Experts | None:
    """The first mixture; all of a model are alike."""
    return next((layer.feed_forward for layer in stack.layers if isinstance(layer.feed_forward, Experts)), None)


def dense_of(stack: Stack) -> FeedForward | None:
    """The first dense feed-forward; all of a model are alike."""
    return next((layer.feed_forward for layer in stack.layers if isinstance(layer.feed_forward, FeedForward)), None)


def activation_name(stack: Stack) -> str:
    first = stack.layers[0].feed_forward
    return ACTIVATION_NAMES_BACK[first.expert.activation if isinstance(first, Experts) else first.activation]
