"""The Transformer of Vaswani et al. 2017, its pre-norm form, and the Annotated Transformer.

All have sinusoids with alternating sines and cosines, embeddings multiplied by √width, and ReLU.
`transformer-*`: one table of 37000 tokens for source, target and head (§3.4), sizes and dropout of Table 3. The
projections have no bias, as in the formulas of §3.2; ε is tensor2tensor's. `-pre-norm` puts the norms before each
branch and one after the last layer, as tensor2tensor does by default.
`annotated-transformer`: make_model(N=6, d_model=512, d_ff=2048, h=8, dropout=0.1) of Rush 2018: pre-norm with a norm
that divides by the standard deviation, biases throughout, separate token tables for source and target, an untied head.
"""

import math
from dataclasses import replace
from typing import Literal

from clearhead.architecture import (
    Bidirectional,
    Causal,
    DeviationNorm,
    Dropout,
    Embedding,
    FeedForward,
    Head,
    Layer,
    LayerNorm,
    ModelConfig,
    Norm,
    SinusoidalPositions,
    Stack,
    XavierInitial,
)
from clearhead.families.family import Family, Preset
from clearhead.families.gpt_style import multi_head_attention

NORM = LayerNorm(epsilon=1e-6)


def transformer_config(
    *,
    width: int = 512,
    num_layers: int = 6,
    num_heads: int = 8,
    feed_forward: int = 2048,
    source_vocab_size: int = 37000,
    target_vocab_size: int = 37000,
    context: int = 1024,  # the paper gives no limit; this is fairseq's for this model
    norm: Norm = NORM,
    placement: Literal["pre", "post"] = "post",
    attention_bias: bool = False,
    head: Head | None = None,
    share_embeddings: bool = True,
    dropout: Dropout | None = None,
    initial: XavierInitial | None = None,
) -> ModelConfig:
    """Return an encoder-decoder, by default of the published base size; pre-norm adds a final norm to each stack."""
    cross_attention = multi_head_attention(
        width, num_heads, pattern=Bidirectional(), input_bias=attention_bias, output_bias=attention_bias
    )
    encoder_layer = Layer(
        attention=cross_attention,
        feed_forward=FeedForward(width=feed_forward, activation="relu", bias=True),
        norm=norm,
        placement=placement,
    )
    decoder_layer = replace(
        encoder_layer, attention=replace(cross_attention, pattern=Causal()), cross_attention=cross_attention
    )
    source = Embedding(vocab_size=source_vocab_size, scale=math.sqrt(width), positions=SinusoidalPositions())
    final_norm = norm if placement == "pre" else None
    return ModelConfig(
        width=width,
        context=context,
        encoder=Stack(embedding=source, layers=(encoder_layer,) * num_layers, final_norm=final_norm),
        decoder=Stack(
            embedding=replace(source, vocab_size=target_vocab_size),
            layers=(decoder_layer,) * num_layers,
            final_norm=final_norm,
        ),
        head=head or Head(),
        share_embeddings=share_embeddings,
        dropout=dropout or Dropout(),
        initial=initial or XavierInitial(),
    )


def _base_preset(placement: Literal["pre", "post"]) -> Preset:
    return lambda: transformer_config(placement=placement, dropout=Dropout(embedding=0.1, residual=0.1))


def _big_preset(placement: Literal["pre", "post"]) -> Preset:
    return lambda: transformer_config(
        width=1024,
        num_heads=16,
        feed_forward=4096,
        placement=placement,
        dropout=Dropout(embedding=0.3, residual=0.3),
    )


def annotated_transformer_config(
    source_vocab_size: int = 37000, target_vocab_size: int = 37000, **sizes: int
) -> ModelConfig:
    """Return the Annotated Transformer; `sizes` are width, num_layers, num_heads and feed_forward.

    Its vocabularies depend on its data; the defaults are those of the 2017 paper.
    """
    return transformer_config(
        **sizes,
        source_vocab_size=source_vocab_size,
        target_vocab_size=target_vocab_size,
        context=5000,  # the length of its table of sinusoids
        norm=DeviationNorm(epsilon=1e-6),
        placement="pre",
        attention_bias=True,
        head=Head(tied=False, bias=True),
        share_embeddings=False,
        dropout=Dropout(embedding=0.1, residual=0.1, attention=0.1, activation=0.1),
        initial=XavierInitial(tables=True),  # its code draws every parameter with more than one dimension
    )


PRESETS: dict[str, Preset] = {
    "transformer-base": _base_preset("post"),
    "transformer-big": _big_preset("post"),
    "transformer-base-pre-norm": _base_preset("pre"),
    "transformer-big-pre-norm": _big_preset("pre"),
    "annotated-transformer": annotated_transformer_config,
}

FAMILY = Family(name="transformer", presets=PRESETS)
