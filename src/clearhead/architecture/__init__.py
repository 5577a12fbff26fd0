"""Configs that describe a network as plain data. This package imports no torch.

    config        a model, its stacks and layers, embedding, output head, dropout, initial weights
    classifier    scores of labels, and the transform before a head
    attention     grouped and latent attention
    feed_forward  dense feed-forward layers and mixtures of experts
    norms         normalization layers
    positions     position encodings
    patterns      which keys a query may attend to
    sentence      hidden states to one vector per text
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
from clearhead.architecture.classifier import Classifier, HeadTransform
from clearhead.architecture.config import (
    AudioEmbedding,
    Dropout,
    Embedding,
    FanInInitial,
    Head,
    Layer,
    ModelConfig,
    NormalInitial,
    Stack,
    XavierInitial,
)
from clearhead.architecture.feed_forward import Activation, ExpertGroups, Experts, FeedForward, GateClamp, Router
from clearhead.architecture.norms import DeviationNorm, LayerNorm, Norm, RmsNorm
from clearhead.architecture.patterns import (
    AttentionPattern,
    Bidirectional,
    Causal,
    CenteredWindow,
    Chunked,
    SlidingWindow,
)
from clearhead.architecture.positions import (
    Alibi,
    Disentangled,
    DynamicScaling,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoPosition,
    Position,
    RelativeBuckets,
    RelativeSinusoid,
    Rope,
    Scaling,
    SinusoidalPositions,
    YarnScaling,
)
from clearhead.architecture.sentence import (
    Normalize,
    Pooling,
    Projection,
    SentenceConfig,
    SentenceStep,
    VectorNorm,
)
from clearhead.architecture.token_limits import check_tokens, remaining_positions

__all__ = [
    "Activation",
    "Alibi",
    "AttentionPattern",
    "AudioEmbedding",
    "Bidirectional",
    "Causal",
    "CenteredWindow",
    "Chunked",
    "Classifier",
    "DeviationNorm",
    "Disentangled",
    "Dropout",
    "DynamicScaling",
    "Embedding",
    "ExpertGroups",
    "Experts",
    "FanInInitial",
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
    "Normalize",
    "Pooling",
    "Position",
    "Projection",
    "QueryTemperature",
    "RelativeBuckets",
    "RelativeSinusoid",
    "RmsNorm",
    "Rope",
    "RotatedHeadNorm",
    "Router",
    "Scaling",
    "ScoreTemperature",
    "SentenceConfig",
    "SentenceStep",
    "SinusoidalPositions",
    "SlidingWindow",
    "Stack",
    "VectorNorm",
    "XavierInitial",
    "YarnScaling",
    "check_tokens",
    "remaining_positions",
]
