"""The network. This room imports no other room of the house.

The walk from ids to logits, one file each:

    transformer   encode, decode, forward: the table of contents
    embedding     ids -> vectors, and at the end vectors -> logits
    context       what each kind of layer is told: its mask (masks) and its positions (positions)
    block         norms, residuals, the order of the branches
    attention     queries, keys, values (latent_attention: DeepSeek's)
    attend        softmax(QKᵀ)V, the reference and the fused kernel
    feed_forward  the other branch (mixture: many of them)

One alphabet of shapes for the whole repository:

    B batch    T query tokens    S key tokens    D width    V vocabulary    L layers
    N heads    K key-value heads    H head width    F feed-forward width    E experts    R latent rank
"""

from clearhead.model.attend import (
    AttentionKernel,
    AttentionSteps,
    Scoring,
    attention_steps,
    fused_attention,
    masked_softmax,
    reference_attention,
    softcap_scores,
)
from clearhead.model.attention import (
    Attention,
)
from clearhead.model.block import (
    Block,
    Residual,
)
from clearhead.model.context import (
    AttentionContext,
    ForwardContext,
    contexts_for,
)
from clearhead.model.embedding import (
    LogitHead,
)
from clearhead.model.feed_forward import (
    ACTIVATIONS,
    FeedForwardLayer,
)
from clearhead.model.masks import (
    Grid,
    Mask,
    cross_attention_mask,
    make_mask,
    places,
    positions_from,
)
from clearhead.model.mixture import (
    MixtureLayer,
    RouterLayer,
)
from clearhead.model.norms import (
    RootMeanSquare,
    StandardDeviation,
)
from clearhead.model.positions import (
    Rotation,
    llama3_frequencies,
    rotation_for,
    sinusoids,
)
from clearhead.model.recurrent import (
    RecurrentConfig,
    RecurrentTranslator,
)
from clearhead.model.transformer import (
    EncoderOutput,
    LayerStack,
    Transformer,
    check_shapes,
)

__all__ = [
    "ACTIVATIONS",
    "Attention",
    "AttentionContext",
    "AttentionKernel",
    "AttentionSteps",
    "Block",
    "EncoderOutput",
    "FeedForwardLayer",
    "ForwardContext",
    "Grid",
    "LayerStack",
    "LogitHead",
    "Mask",
    "MixtureLayer",
    "RecurrentConfig",
    "RecurrentTranslator",
    "Residual",
    "RootMeanSquare",
    "Rotation",
    "RouterLayer",
    "Scoring",
    "StandardDeviation",
    "Transformer",
    "attention_steps",
    "check_shapes",
    "contexts_for",
    "cross_attention_mask",
    "fused_attention",
    "llama3_frequencies",
    "make_mask",
    "masked_softmax",
    "places",
    "positions_from",
    "reference_attention",
    "rotation_for",
    "sinusoids",
    "softcap_scores",
]
