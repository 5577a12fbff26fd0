"""Decide from a config alone, without building a network, whether a backend can compute a model.

    reason = unsupported_reason(preset("gpt2"), "cuda")      # None: supported

A reason is a short clause that completes "this model cannot run on the backend: ...". What depends on a live network,
on a call or on the machine is checked in live_checks.py.
"""

from collections.abc import Collection, Iterator
from typing import Literal

import torch

from clearhead.architecture import (
    Activation,
    Alibi,
    AttentionPattern,
    Bidirectional,
    Causal,
    Chunked,
    DeviationNorm,
    Experts,
    FeedForward,
    GroupedAttention,
    HeadNorm,
    Layer,
    LayerNorm,
    ModelConfig,
    NoPosition,
    Norm,
    Position,
    QueryTemperature,
    RelativeBuckets,
    RmsNorm,
    Rope,
    RotatedHeadNorm,
    ScoreTemperature,
    SlidingWindow,
    Stack,
)

# The C++ kernels; the Triton kernels in a CUDA graph over a contiguous cache, and over pages.
Backend = Literal["cpu", "cuda", "paged"]

_TRITON_ACTIVATIONS: tuple[Activation, ...] = ("relu", "gelu", "gelu_tanh", "silu")
ACTIVATIONS: dict[Backend, tuple[Activation, ...]] = {
    "cpu": (*_TRITON_ACTIVATIONS, "relu_squared", "gelu_quick", "tanh", "xielu"),
    "cuda": _TRITON_ACTIVATIONS,
    "paged": _TRITON_ACTIVATIONS,
}
DTYPES: dict[Backend, tuple[torch.dtype, ...]] = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
    "paged": (torch.float32, torch.bfloat16, torch.float16),
}
PLACEMENTS: dict[Backend, tuple[str, ...]] = {
    "cpu": ("pre", "post", "sandwich", "branch", "parallel", "parallel_norms"),
    "cuda": ("pre", "sandwich"),
    "paged": ("pre", "post", "sandwich", "parallel"),
}
# The patterns of self-attention in a decoder. In cross-attention, everything is attended to.
_PATTERNS: dict[Backend, tuple[type[AttentionPattern], ...]] = {
    "cpu": (Causal, SlidingWindow, Chunked, Bidirectional),
    "cuda": (Causal, SlidingWindow),
    "paged": (Causal, SlidingWindow, Chunked),
}
_POSITIONS: dict[Backend, tuple[type[Position], ...]] = {
    "cpu": (Rope, NoPosition, Alibi, RelativeBuckets),
    "cuda": (Rope, NoPosition),
    "paged": (Rope, NoPosition, Alibi, RelativeBuckets),
}
_UNKNOWN_TEMPERATURES: dict[Backend, tuple[type, ...]] = {
    "cpu": (),
    "cuda": (QueryTemperature, ScoreTemperature),
    "paged": (ScoreTemperature,),
}
# A Triton program holds the query heads of one key-value head in a tile of 16 rows and a power of two of columns.
_TILE_ROWS, _SMALLEST_TILE_WIDTH = 16, 16


def unsupported_reason(config: ModelConfig, backend: Backend) -> str | None:
    """Return why `backend` cannot compute a model with this config, or None if it can."""
    return next(_problems_of_model(config, backend), None)


def unsupported_weights(dtypes: Collection[torch.dtype], device_type: str, backend: Backend) -> str | None:
    """Return why `backend` cannot compute with weights of these dtypes on a device of this type, or None if it can.

    The CUDA graph may also be laid out on the CPU or the meta device, for tests and cost estimates.
    """
    if len(set(dtypes)) > 1:
        return "weights of several dtypes are not supported"
    (dtype,) = set(dtypes)
    name = str(dtype).removeprefix("torch.")
    if backend == "cpu" and device_type != "cpu":
        return f"{name} weights on {device_type} are not supported"
    return None if dtype in DTYPES[backend] else f"{name} weights are not supported"


def _problems_of_model(config: ModelConfig, backend: Backend) -> Iterator[str]:
    stack = config.decoder
    if stack is None:
        yield "an encoder-only model does not decode"
        return
    if backend == "cuda" and config.encoder is not None:
        yield "models with an encoder are not supported"
    if backend == "cpu" and config.head is not None and config.head.transform is not None:
        yield "a logit head with a transform is not supported"
    if stack.final_norm is not None:
        yield from _problems_of_norm(stack.final_norm, backend)
    for layer in stack.layers:
        yield from _problems_of_layer(layer, backend, _PATTERNS[backend])
    if backend == "paged" and config.reads_audio:
        yield "an encoder that reads audio is not supported"
    if backend == "paged" and config.encoder is not None:  # on the CPU, the encoder runs in the modules
        yield from (f"in the encoder, {problem}" for problem in _problems_of_encoder(config.encoder))
    sizes = {_head_sizes(layer.attention) for layer in stack.layers if isinstance(layer.attention, GroupedAttention)}
    if backend == "cuda" and len(sizes) > 1:
        yield "layers with different head sizes are not supported"


def _problems_of_encoder(stack: Stack) -> Iterator[str]:
    if stack.final_norm is not None:
        yield from _problems_of_norm(stack.final_norm, "paged")
    for layer in stack.layers:
        yield from _problems_of_layer(layer, "paged", (Bidirectional,))


def _problems_of_layer(layer: Layer, backend: Backend, patterns: tuple[type[AttentionPattern], ...]) -> Iterator[str]:
    if layer.placement not in PLACEMENTS[backend]:
        yield f"{layer.placement} norm placement is not supported"
    if layer.branch_scale != 1.0 and backend != "cpu":
        yield "a scale on the branches is not supported"
    yield from _problems_of_norm(layer.norm, backend)
    yield from _problems_of_feed_forward(layer.feed_forward, backend)
    if backend == "paged" and not layer.attention_norm:
        yield "attention without a norm before it is not supported"
    attention = layer.attention
    if isinstance(attention, GroupedAttention):
        yield from _problems_of_attention(attention, backend)
        if not isinstance(attention.pattern, patterns):
            yield f"{type(attention.pattern).__name__} attention is not supported"
    elif backend == "cuda" or patterns == (Bidirectional,) or not isinstance(attention.pattern, Causal):
        yield "latent attention is not supported"
    elif backend == "cpu" and attention.rope.depends_on_length:
        yield f"{type(attention.rope.scaling).__name__} of rotary positions is not supported"
    if layer.cross_attention is not None:
        yield from _problems_of_attention(layer.cross_attention, backend)
        if layer.cross_attention.temperature is not None:
            yield "cross-attention with temperature is not supported"


def _problems_of_norm(norm: Norm, backend: Backend) -> Iterator[str]:
    if backend == "cpu":
        return
    if isinstance(norm, DeviationNorm):
        yield "DeviationNorm is not supported"
    if isinstance(norm, LayerNorm) and (norm.unit_offset or not norm.weight):
        yield "LayerNorm with a unit offset or without a weight is not supported"


def _problems_of_feed_forward(config: FeedForward | Experts, backend: Backend) -> Iterator[str]:
    expert = config if isinstance(config, FeedForward) else config.expert
    if isinstance(config, Experts):
        if backend == "cuda":
            yield "a mixture of experts is not supported"
        if config.shared_gate and backend != "cpu":
            yield "a gate on the shared expert is not supported"
        if (config.expert.bias or config.router.bias) and backend != "cpu":
            yield "experts with biases are not supported"
    if expert.activation not in ACTIVATIONS[backend]:
        yield f"activation {expert.activation} is not supported"
    if expert.clamp is not None and backend != "cpu":
        yield "a clamped gate is not supported"


def _problems_of_attention(attention: GroupedAttention, backend: Backend) -> Iterator[str]:
    position, temperature = attention.position, attention.temperature
    if not isinstance(position, _POSITIONS[backend]):
        yield f"{type(position).__name__} positions are not supported"
    adds_bias = isinstance(position, Alibi | RelativeBuckets)
    if backend == "cpu" and adds_bias and isinstance(attention.pattern, Bidirectional):
        yield f"{type(position).__name__} positions without a causal mask are not supported"
    if isinstance(position, Rope) and position.depends_on_length:  # no table of angles fits
        yield f"{type(position.scaling).__name__} of rotary positions is not supported"
    if attention.value_width not in (None, attention.head_width):
        yield "values of another width than the keys are not supported"
    if attention.clip is not None and backend != "cpu":
        yield "attention with clip is not supported"
    if attention.softcap is not None and backend == "cuda":
        yield "attention with softcap is not supported"
    if isinstance(temperature, _UNKNOWN_TEMPERATURES[backend]):
        yield "attention with temperature is not supported"
    if backend == "cuda":
        yield from _problems_of_tiles(attention)
    if attention.sinks and backend != "cpu":
        yield "attention with sinks is not supported"
    yield from _problems_of_head_norm(attention.head_norm, backend)


def _problems_of_head_norm(norm: HeadNorm | RotatedHeadNorm | None, backend: Backend) -> Iterator[str]:
    if isinstance(norm, RotatedHeadNorm) and backend == "cuda":
        yield "RotatedHeadNorm is not supported"
    if not isinstance(norm, HeadNorm):
        return
    if backend == "cpu":
        if norm.scope == "per_head" and norm.after_rotation:
            yield "a head norm with scope per_head after the rotation is not supported"
        return
    if norm.scope != "shared" or norm.after_rotation:
        place = "after the rotation" if norm.after_rotation else f"with scope {norm.scope}"
        yield f"a head norm {place} is not supported"
    if not isinstance(norm.norm, RmsNorm):
        yield "a head norm other than RmsNorm is not supported"


def _problems_of_tiles(attention: GroupedAttention) -> Iterator[str]:
    """Yield what does not fit into the tiles of the Triton attention kernel."""
    width = attention.head_width
    if width < _SMALLEST_TILE_WIDTH or width & (width - 1):
        yield f"head width {width} is not supported: it must be a power of two of at least {_SMALLEST_TILE_WIDTH}"
    if attention.num_heads > _TILE_ROWS * attention.num_kv_heads:
        yield f"more than {_TILE_ROWS} query heads per key-value head are not supported"


def _head_sizes(attention: GroupedAttention) -> tuple[int, int, int]:
    return attention.num_heads, attention.num_kv_heads, attention.head_width
