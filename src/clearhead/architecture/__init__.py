"""Configs that describe a network as plain data. This package imports no torch.

    config        a model, its stacks and layers, embedding, output head, dropout, initial weights
    attention     grouped and latent attention
    feed_forward  dense feed-forward layers and mixtures of experts
    norms         normalization layers
    positions     position encodings
    patterns      which keys a query may attend to
    token_limits  whether a stack can read given tokens

model/ builds a network from a `ModelConfig`; families/ holds the configs of released models.
"""

from clearhead.architecture.attention import (
    GroupedAttention,
    HeadNorm,
    LatentAttention,
    QueryTemperature,
    RotatedHeadNorm,
    ScoreTemperature,
)
from clearhead.architecture.config import (
    Dropout,
    Embedding,
    Head,
    HeadTransform,
    Layer,
    ModelConfig,
    NormalInitial,
    Stack,
    XavierInitial,
)
from clearhead.architecture.feed_forward import Activation, ExpertGroups, Experts, FeedForward, GateClamp, Router
from clearhead.architecture.norms import DeviationNorm, LayerNorm, Norm, RmsNorm
from clearhead.architecture.patterns import AttentionPattern, Bidirectional, Causal, Chunked, SlidingWindow
from clearhead.architecture.positions import (
    Alibi,
    DynamicScaling,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoPosition,
    RelativeBuckets,
    RelativeSinusoid,
    Rope,
    Scaling,
    SinusoidalPositions,
    YarnScaling,
)
from clearhead.architecture.token_limits import check_tokens, remaining_positions

__all__ = [
    "Activation",
    "Alibi",
    "AttentionPattern",
    "Bidirectional",
    "Causal",
    "Chunked",
    "DeviationNorm",
    "Dropout",
    "DynamicScaling",
    "Embedding",
    "ExpertGroups",
    "Experts",
    "FeedForward",
    "GateClamp",
    "GroupedAttention",
    "Head",
    "HeadNorm",
    "HeadTransform",
    "LatentAttention",
    "Layer",
    "LayerNorm",
    "LearnedPositions",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "ModelConfig",
    "NoPosition",
    "Norm",
    "NormalInitial",
    "QueryTemperature",
    "RelativeBuckets",
    "RelativeSinusoid",
    "RmsNorm",
    "Rope",
    "RotatedHeadNorm",
    "Router",
    "Scaling",
    "ScoreTemperature",
    "SinusoidalPositions",
    "SlidingWindow",
    "Stack",
    "XavierInitial",
    "YarnScaling",
    "check_tokens",
    "remaining_positions",
]
