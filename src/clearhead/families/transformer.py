"""The Transformer of Vaswani et al. 2017, its pre-norm form, and the Annotated Transformer's.

Sinusoids with sines and cosines alternating, embeddings times √width, ReLU.
`transformer-*`: one table of 37000 tokens for source, target and head (§3.4), sizes and dropout of Table 3. The
projections have no bias, as the formulas of §3.2; ε is tensor2tensor's. `-pre-norm` puts the norms before each branch
and one at the end, as tensor2tensor does by default.
`annotated-transformer`: make_model(N=6, d_model=512, d_ff=2048, h=8, dropout=0.1) of Rush 2018: pre-norm with a norm
that divides by the deviation, biases throughout, two tables and a head of its own.
"""

import math
from collections.abc import Callable
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
from clearhead.families.family import Family
from clearhead.families.plain import multi_head

NORM = LayerNorm(epsilon=1e-6)


def transformer(
    *,
    width: int = 512,
    num_layers: int = 6,
    num_heads: int = 8,
    feed_forward: int = 2048,
    source_vocab_size: int = 37000,
    target_vocab_size: int = 37000,
    context: int = 1024,  # no limit is published; fairseq's for this model
    norm: Norm = NORM,
    placement: Literal["pre", "post"] = "post",
    attention_bias: bool = False,
    head: Head | None = None,
    share_embeddings: bool = True,
    dropout: Dropout | None = None,
) -> ModelConfig:
    """The published base size unless told otherwise; a last norm stands where the others stand before branches."""
    across = multi_head(
        width, num_heads, pattern=Bidirectional(), input_bias=attention_bias, output_bias=attention_bias
    )
    encoding = Layer(
        attention=across,
        feed_forward=FeedForward(width=feed_forward, activation="relu", bias=True),
        norm=norm,
        placement=placement,
    )
    decoding = replace(encoding, attention=replace(across, pattern=Causal()), cross_attention=across)
    source = Embedding(vocab_size=source_vocab_size, scale=math.sqrt(width), positions=SinusoidalPositions())
    final_norm = norm if placement == "pre" else None
    return ModelConfig(
        width=width,
        context=context,
        encoder=Stack(embedding=source, layers=(encoding,) * num_layers, final_norm=final_norm),
        decoder=Stack(
            embedding=replace(source, vocab_size=target_vocab_size),
            layers=(decoding,) * num_layers,
            final_norm=final_norm,
        ),
        head=head or Head(),
        share_embeddings=share_embeddings,
        dropout=dropout or Dropout(),
        initial=XavierInitial(),
    )


def base(placement: Literal["pre", "post"]) -> Callable[[], ModelConfig]:
    return lambda: transformer(placement=placement, dropout=Dropout(embedding=0.1, residual=0.1))


def big(placement: Literal["pre", "post"]) -> Callable[[], ModelConfig]:
    return lambda: transformer(
        width=1024,
        num_heads=16,
        feed_forward=4096,
        placement=placement,
        dropout=Dropout(embedding=0.3, residual=0.3),
    )


def annotated(source_vocab_size: int = 37000, target_vocab_size: int = 37000, **sizes: int) -> ModelConfig:
    """`sizes`: width, num_layers, num_heads, feed_forward. Its vocabularies come from its data; here the paper's."""
    return transformer(
        **sizes,
        source_vocab_size=source_vocab_size,
        target_vocab_size=target_vocab_size,
        context=5000,  # length of its table of sinusoids
        norm=DeviationNorm(epsilon=1e-6),
        placement="pre",
        attention_bias=True,
        head=Head(tied=False, bias=True),
        share_embeddings=False,
        dropout=Dropout(embedding=0.1, residual=0.1, attention=0.1, activation=0.1),
    )


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "transformer-base": base("post"),
    "transformer-big": big("post"),
    "transformer-base-pre-norm": base("pre"),
    "transformer-big-pre-norm": big("pre"),
    "annotated-transformer": annotated,
}

FAMILY = Family(name="transformer", presets=PRESETS)
