"""Number of parameters of every part of a model, from its config alone.

    parameters_by_part(preset("llama-3.1-8b"))["attention"]

For every preset, tests/costs/test_parameters.py compares the counts with the network on the meta device.
"""

from clearhead.architecture import (
    AudioEmbedding,
    DeviationNorm,
    Disentangled,
    Embedding,
    Experts,
    FeedForward,
    GroupedAttention,
    HeadNorm,
    HeadTransform,
    LatentAttention,
    Layer,
    LayerNorm,
    LearnedPositions,
    ModelConfig,
    Norm,
    RelativeBuckets,
    RelativeSinusoid,
    Stack,
)
from clearhead.cache import key_value_shape

PARTS = ("embedding", "attention", "cross-attention", "feed-forward", "norms", "head", "pooler", "classifier")


def parameters_by_part(config: ModelConfig) -> dict[str, int]:
    """Return the number of parameters of each part of the model, without the parts that have none."""
    width = config.width
    counts = dict.fromkeys(PARTS, 0)
    for stack in (config.encoder, config.decoder):
        for part, count in _stack_parameters(stack, width).items() if stack else ():
            counts[part] += count
    if config.share_embeddings:
        counts["embedding"] -= config.vocab_size * width
    if config.head is not None:
        table_width = config.output_stack.token_embedding.width or width
        counts["head"] += 0 if config.head.tied else config.vocab_size * table_width
        counts["head"] += config.vocab_size * config.head.bias
        counts["head"] += _transform_parameters(config.head.transform, width, table_width)
    counts["pooler"] = (width * width + width) * config.pooler
    if config.classifier is not None:
        counts["classifier"] = config.classifier.num_labels * (width + config.classifier.bias)
        counts["classifier"] += _transform_parameters(config.classifier.transform, width, width)
    return {part: count for part, count in counts.items() if count}


def _transform_parameters(transform: HeadTransform | None, width: int, output_width: int) -> int:
    if transform is None:
        return 0
    norm = 0 if transform.norm is None else _norm_parameters(transform.norm, output_width)
    return output_width * (width + transform.bias) + norm


def total_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of the model."""
    return sum(parameters_by_part(config).values())


def active_parameters(config: ModelConfig) -> int:
    """Return the number of parameters that one token uses: of a mixture, only the selected experts."""
    layers = [layer for stack in (config.encoder, config.decoder) if stack for layer in stack.layers]
    mixtures = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, Experts)]
    num_idle = sum(
        (mixture.num_experts - mixture.num_chosen) * _feed_forward_parameters(mixture.expert, config.width)
        for mixture in mixtures
    )
    return total_parameters(config) - num_idle


def _stack_parameters(stack: Stack, width: int) -> dict[str, int]:
    counts = {
        "embedding": _embedding_parameters(stack.embedding, width),
        "attention": _bucket_parameters(stack, width),
        "norms": _norm_parameters(stack.final_norm, width) if stack.final_norm else 0,
    }
    if isinstance(stack.embedding, Embedding) and stack.embedding.norm is not None:
        counts["norms"] += _norm_parameters(stack.embedding.norm, stack.embedding.width or width)
    for layer in stack.layers[:1] if stack.shared_layers else stack.layers:
        for part, count in layer_parameters(layer, width).items():
            counts[part] = counts.get(part, 0) + count
    return counts


def layer_parameters(layer: Layer, width: int) -> dict[str, int]:
    """Return the number of parameters of each part of one layer in a model of this width."""
    cross_attention = layer.cross_attention
    return {
        "attention": _attention_parameters(layer.attention, width),
        "cross-attention": 0 if cross_attention is None else _attention_parameters(cross_attention, width),
        "feed-forward": _branch_parameters(layer.feed_forward, width),
        "norms": _num_norms(layer) * _norm_parameters(layer.norm, width),
    }


def _bucket_parameters(stack: Stack, width: int) -> int:
    """Return the size of the relative position table, which all layers of a stack share."""
    for layer in stack.layers:
        position = layer.attention.position
        if isinstance(position, Disentangled):
            return 2 * position.num_buckets * width + _norm_parameters(position.norm, width)
        if isinstance(position, RelativeBuckets) and not position.per_layer:
            return position.num_buckets * layer.attention.num_heads
    return 0


def _embedding_parameters(config: Embedding | AudioEmbedding, width: int) -> int:
    if isinstance(config, AudioEmbedding):  # two convolutions of width 3 with biases, and the table of positions
        return 3 * width * (config.num_mel_bands + width) + 2 * width + config.num_positions * width
    positions = config.positions
    num_learned = positions.num_positions + positions.offset if isinstance(positions, LearnedPositions) else 0
    projection = 0 if config.width is None else width * (config.width + 1)
    return (config.vocab_size + num_learned + config.num_token_types) * (config.width or width) + projection


def _attention_parameters(config: GroupedAttention | LatentAttention, width: int) -> int:
    if isinstance(config, LatentAttention):
        return _latent_attention_parameters(config, width)
    return _grouped_attention_parameters(config, width)


def _grouped_attention_parameters(config: GroupedAttention, width: int) -> int:
    num_kv_heads, head_width, value_width = key_value_shape(config)
    query_width = config.num_heads * head_width
    input_width = query_width + num_kv_heads * (head_width + value_width)  # queries, keys and values
    output_width = config.num_heads * value_width
    count = width * input_width + output_width * width + input_width * config.input_bias + width * config.output_bias
    count -= num_kv_heads * head_width * (not config.key_bias)
    if isinstance(config.head_norm, HeadNorm):
        num_norms = 2 if config.head_norm.scope == "shared" else config.num_heads + num_kv_heads
        count += num_norms * _norm_parameters(config.head_norm.norm, head_width)
    count += config.num_heads * config.sinks
    if isinstance(config.position, RelativeBuckets) and config.position.per_layer:
        count += config.position.num_buckets * config.num_heads
    if isinstance(config.position, RelativeSinusoid):
        count += width * query_width + 2 * query_width
    return count


def _latent_attention_parameters(config: LatentAttention, width: int) -> int:
    query_width = config.num_heads * (config.plain_width + config.rotary_width)
    rank = config.query_rank
    query = width * query_width if rank is None else width * rank + rank + rank * query_width
    latent = width * (config.latent_rank + config.rotary_width) + config.latent_rank
    expansion = config.latent_rank * config.num_heads * (config.plain_width + config.value_width)
    return query + latent + expansion + config.num_heads * config.value_width * width


def _branch_parameters(config: FeedForward | Experts, width: int) -> int:
    if isinstance(config, FeedForward):
        return _feed_forward_parameters(config, width)
    shared = _feed_forward_parameters(config.shared, width) if config.shared else 0
    per_expert = width + config.router.bias + _feed_forward_parameters(config.expert, width)
    return config.num_experts * per_expert + shared + width * config.shared_gate


def _feed_forward_parameters(config: FeedForward, width: int) -> int:
    num_inputs = 1 + config.gated  # matrices from the model's width to the inner width
    matrices = (num_inputs + 1) * width * config.width
    learned_activation = 2 if config.activation == "xielu" else 0
    return matrices + (num_inputs * config.width + width) * config.bias + learned_activation


def _norm_parameters(config: Norm, width: int) -> int:
    if isinstance(config, LayerNorm):
        return width * (config.weight + config.bias)
    return width * (2 if isinstance(config, DeviationNorm) else 1)


def _num_norms(layer: Layer) -> int:
    """Return the number of norms: one per residual connection, two in a sandwich; parallel branches share one."""
    num_residuals = 1 if layer.placement == "parallel" else 2 + (layer.cross_attention is not None)
    return num_residuals * (1 + (layer.placement == "sandwich")) - (not layer.attention_norm)
