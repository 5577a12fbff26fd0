"""The network. This package imports only architecture/, config and errors.

A forward pass goes from token ids to logits through these modules, in this order:

    transformer   the model: encode, decode, forward
    embedding     token ids to vectors at the start, vectors to logits at the end (audio: mel bands to vectors)
    context       what attention needs besides hidden states: masks (masks), positions (positions), cache protocol
    block         one layer: residual connections and norms (norms) around its branches
    attention     queries, keys and values (latent_attention: DeepSeek's; disentangled: DeBERTa's distances)
    attend        the attention kernels: softmax(Q Kᵀ) V
    feed_forward  the feed-forward branch (mixture: mixture of experts)

classifier computes the scores of labels, and sentence one vector per text. initialize draws the initial weights, and
recurrent is the RNN encoder-decoder that preceded the Transformer.

One alphabet of shapes for the whole repository:

    B batch    T query tokens    S key tokens    D width    V vocabulary    L layers
    N heads    K key-value heads    H head width    F feed-forward width    E experts    R latent rank
"""

from clearhead.model.attend import (
    AttentionKernel,
    AttentionSteps,
    Scoring,
    apply_softcap,
    attention_steps,
    compute_scores,
    explicit_mask,
    fused_attention,
    is_fusible,
    masked_softmax,
    reference_attention,
    weigh_keys,
    weigh_values,
)
from clearhead.model.attention import Attention, temperature_factors
from clearhead.model.audio import AudioEmbeddingLayer
from clearhead.model.block import Block, Residual
from clearhead.model.context import AttentionContext, EncoderOutput, ForwardContext, make_contexts
from clearhead.model.embedding import LogitHead, TokenEmbedding, check_shapes
from clearhead.model.feed_forward import ACTIVATIONS, FeedForwardLayer, Xielu
from clearhead.model.latent_attention import LatentAttentionLayer
from clearhead.model.masks import (
    AttentionIndices,
    Mask,
    cross_attention_mask,
    make_mask,
    positions_from_mask,
    resolve_positions,
)
from clearhead.model.mixture import MixtureLayer, RouterLayer
from clearhead.model.norms import DeviationNormLayer, JointNorm, OffsetLayerNorm, PerHeadNorm, RmsNormLayer
from clearhead.model.positions import (
    alibi_bias,
    alibi_slopes,
    llama3_frequencies,
    make_rotation,
    relative_position_bucket,
    sinusoids,
)
from clearhead.model.recurrent import RecurrentConfig, RecurrentTranslator
from clearhead.model.sentence import SentencePooler
from clearhead.model.transformer import LayerStack, Transformer

__all__ = [
    "ACTIVATIONS",
    "Attention",
    "AttentionContext",
    "AttentionIndices",
    "AttentionKernel",
    "AttentionSteps",
    "AudioEmbeddingLayer",
    "Block",
    "DeviationNormLayer",
    "EncoderOutput",
    "FeedForwardLayer",
    "ForwardContext",
    "JointNorm",
    "LatentAttentionLayer",
    "LayerStack",
    "LogitHead",
    "Mask",
    "MixtureLayer",
    "OffsetLayerNorm",
    "PerHeadNorm",
    "RecurrentConfig",
    "RecurrentTranslator",
    "Residual",
    "RmsNormLayer",
    "RouterLayer",
    "Scoring",
    "SentencePooler",
    "TokenEmbedding",
    "Transformer",
    "Xielu",
    "alibi_bias",
    "alibi_slopes",
    "apply_softcap",
    "attention_steps",
    "check_shapes",
    "compute_scores",
    "cross_attention_mask",
    "explicit_mask",
    "fused_attention",
    "is_fusible",
    "llama3_frequencies",
    "make_contexts",
    "make_mask",
    "make_rotation",
    "masked_softmax",
    "positions_from_mask",
    "reference_attention",
    "relative_position_bucket",
    "resolve_positions",
    "sinusoids",
    "temperature_factors",
    "weigh_keys",
    "weigh_values",
]
