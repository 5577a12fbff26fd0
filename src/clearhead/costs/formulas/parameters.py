"""How many parameters each part of a model has, from its config alone.

    parameters(preset("llama-3.1-8b"))["attention"]

Equal to the network laid out on the meta device, for every preset: tests/costs/test_parameters.py.
"""

from clearhead.architecture import (
    DeviationNorm,
    Embedding,
    Experts,
    FeedForward,
    GroupedAttention,
    HeadNorm,
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


def parameters(config: ModelConfig) -> dict[str, int]:
    """By part; parts of no parameters are left out."""
    width = config.width
    counts = dict.fromkeys(("embedding", "attention", "cross-attention", "feed-forward", "norms", "head", "pooler"), 0)
    for stack in (config.encoder, config.decoder):
        for part, number in stack_parameters(stack, width).items() if stack else ():
            counts[part] += number
    if config.share_embeddings:
        counts["embedding"] -= config.vocab_size * width
    if config.head is not None:
        transform = config.head.transform
        counts["head"] += 0 if config.head.tied else config.vocab_size * width
        counts["head"] += config.vocab_size * config.head.bias
        counts["head"] += width * width + width + of_norm(transform.norm, width) if transform else 0
    counts["pooler"] = (width * width + width) * config.pooler
    return {part: number for part, number in counts.items() if number}


def active_parameters(config: ModelConfig) -> int:
    """Of all those, the ones that one token uses: of a mixture only the chosen experts."""
    layers = [layer for stack in (config.encoder, config.decoder) if stack for layer in stack.layers]
    mixtures = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, Experts)]
    idle = sum((part.num_experts - part.num_chosen) * of_feed_forward(part.expert, config.width) for part in mixtures)
    return sum(parameters(config).values()) - idle


def stack_parameters(stack: Stack, width: int) -> dict[str, int]:
    shared_table = next((layer.attention for layer in stack.layers if has_buckets(layer)), None)
    buckets = 0
    if shared_table is not None and isinstance(shared_table.position, RelativeBuckets):
        buckets = shared_table.position.num_buckets * shared_table.num_heads
    norms = [stack.embedding.norm, stack.final_norm]
    return {
        "embedding": of_embedding(stack.embedding, width),
        "attention": buckets + sum(of_attention(layer.attention, width) for layer in stack.layers),
        "cross-attention": sum(
            of_attention(layer.cross_attention, width) for layer in stack.layers if layer.cross_attention is not None
        ),
        "feed-forward": sum(of_branch(layer.feed_forward, width) for layer in stack.layers),
        "norms": sum(of_norm(norm, width) for norm in norms if norm)
        + sum(of_norms(one, width) for one in stack.layers),
    }


def has_buckets(layer: Layer) -> bool:
    return isinstance(layer.attention.position, RelativeBuckets)


def of_embedding(config: Embedding, width: int) -> int:
    positions = config.positions
    learned = positions.num_positions + positions.offset if isinstance(positions, LearnedPositions) else 0
    return (config.vocab_size + learned + config.num_token_types) * width


def of_attention(config: GroupedAttention | LatentAttention, width: int) -> int:
    return of_latent(config, width) if isinstance(config, LatentAttention) else of_grouped(config, width)


def of_grouped(config: GroupedAttention, width: int) -> int:
    value = config.value_width or config.head_width
    queries = config.num_heads * config.head_width
    read = queries + config.num_kv_heads * (config.head_width + value)
    count = width * read + config.num_heads * value * width + read * config.input_bias + width * config.output_bias
    if isinstance(config.head_norm, HeadNorm):
        count += 2 * of_norm(config.head_norm.norm, config.head_width)
    if isinstance(config.position, RelativeSinusoid):
        count += width * queries + 2 * queries
    return count


def of_latent(config: LatentAttention, width: int) -> int:
    queries = config.num_heads * (config.plain_width + config.rotary_width)
    rank = config.query_rank
    query = width * queries if rank is None else width * rank + rank + rank * queries
    latent = width * (config.latent_rank + config.rotary_width) + config.latent_rank
    unfold = config.latent_rank * config.num_heads * (config.plain_width + config.value_width)
    return query + latent + unfold + config.num_heads * config.value_width * width


def of_branch(config: FeedForward | Experts, width: int) -> int:
    if isinstance(config, FeedForward):
        return of_feed_forward(config, width)
    shared = of_feed_forward(config.shared, width) if config.shared else 0
    return config.num_experts * (width + of_feed_forward(config.expert, width)) + shared


def of_feed_forward(config: FeedForward, width: int) -> int:
    into = 1 + config.gated
    return (into + 1) * width * config.width + (into * config.width + width) * config.bias


def of_norm(config: Norm, width: int) -> int:
    has_bias = isinstance(config, DeviationNorm) or (isinstance(config, LayerNorm) and config.bias)
    return width * (1 + has_bias)


def of_norms(layer: Layer, width: int) -> int:
    """One for each residual, two in a sandwich; a parallel layer has one residual."""
    residuals = 1 if layer.placement == "parallel" else 2 + (layer.cross_attention is not None)
    return residuals * (1 + (layer.placement == "sandwich")) * of_norm(layer.norm, width)
