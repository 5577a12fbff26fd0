"""CTranslate2's Marian models in our words: its settings become a config, its names become ours.

    config = marian_config(settings, shapes, where="model.bin")   # then checkpoint/fill, by NAMES

Query, key and value are one matrix in self-attention; key and value are one in cross-attention. Marian's decoder
starts from a zero vector: here, as in transformers, from one more token whose row in the table is zero.
Sources, in github.com/OpenNMT/CTranslate2: specs/transformer_spec.py, specs/common_spec.py (activations) and, for
what a missing setting means, src/layers/transformer.cc and src/layers/common.cc.
"""

import math
import re
from collections.abc import Mapping

from clearhead.architecture import Activation, ModelConfig
from clearhead.errors import ClearheadError
from clearhead.families.bart import Size, bart
from clearhead.families.names import Fused, Table

Numbers = Mapping[str, int | float]
Shapes = Mapping[str, tuple[int, ...]]

TABLE, LOGIT_BIAS = "decoder/embeddings/weight", "decoder/projection/bias"
POSITIONS = "{stack}/position_encodings/encodings"
# By CTranslate2's number
ACTIVATIONS: dict[int, Activation] = {
    0: "relu",
    1: "gelu_tanh",
    2: "silu",
    3: "gelu",
    4: "gelu_quick",
    5: "tanh",
}
# Setting -> what it must be, and what it is where the file does not say
FIXED = {
    "encoder/pre_norm": (0, 1),
    "decoder/pre_norm": (0, 1),
    "decoder/alibi": (0, 0),
    "encoder/multi_query_attention": (0, 0),
    "decoder/start_from_zero_embedding": (1, 0),
}
READ = tuple(
    f"{stack}/{name}" for stack in ("encoder", "decoder") for name in ("num_heads", "activation", "scale_embeddings")
)
WITHOUT_EFFECT = (
    r"decoder/alignment_(layer|heads)",  # which attention weights to show
    r"decoder/(alibi_use_positive_positions|scale_alibi)",  # there is no ALiBi
    r"encoder/embeddings_merge",  # there is one embedding
    r".*/keep_in_float32",  # of quantisation
)
SHARED = {"decoder/projection/weight": TABLE, "encoder/embeddings_0/weight": TABLE}  # must be aliases of one tensor


def marian_config(settings: Numbers, shapes: Shapes, where: str) -> ModelConfig:
    """`shapes` of the stored tensors, of which the biases alone are needed."""
    check_settings(settings, where)
    width = size_of("encoder/layer_0/ffn/linear_1/bias", shapes, where)
    return bart(
        "marian",
        width=width,
        encoder=stack_size("encoder", settings, shapes, where),
        decoder=stack_size("decoder", settings, shapes, where),
        vocab_size=size_of(LOGIT_BIAS, shapes, where) + 1,  # and the token to start from
        context=min(size_of(POSITIONS.format(stack=stack), shapes, where) for stack in ("encoder", "decoder")),
        activation=activation_of(settings, where),
        scaled=is_scaled(settings, width, where),
    )


def check_settings(settings: Numbers, where: str) -> None:
    for name, (needed, default) in FIXED.items():
        if settings.get(name, default) != needed:
            raise ClearheadError(f"{where}: {name} is {settings.get(name, default)}; Marian models have {needed}")
    known = re.compile("|".join((*FIXED, *READ, *WITHOUT_EFFECT)))
    for name, value in settings.items():
        if not known.fullmatch(name):
            raise ClearheadError(f"{where}: {name} is {value}, which Marian models do not have")


def stack_size(stack: str, settings: Numbers, shapes: Shapes, where: str) -> Size:
    num_layers = 0
    while f"{stack}/layer_{num_layers}/ffn/linear_0/bias" in shapes:
        num_layers += 1
    return Size(
        num_layers=num_layers,
        num_heads=whole(f"{stack}/num_heads", settings, where),
        feed_forward=size_of(f"{stack}/layer_0/ffn/linear_0/bias", shapes, where),
    )


def size_of(name: str, shapes: Shapes, where: str) -> int:
    if name not in shapes:
        raise ClearheadError(f"{where} lacks the tensor {name}, which Marian models have")
    return shapes[name][0]


def whole(name: str, settings: Numbers, where: str) -> int:
    value = settings.get(name)
    if not isinstance(value, int):
        raise ClearheadError(f"{where} must have a whole number as {name}, not {value}")
    return value


def activation_of(settings: Numbers, where: str) -> Activation:
    numbers = {whole(f"{stack}/activation", settings, where) for stack in ("encoder", "decoder")}
    if len(numbers) > 1 or not numbers <= set(ACTIVATIONS):
        shown = " and ".join(map(str, sorted(numbers)))
        raise ClearheadError(f"{where}: the activation is number {shown}; one of 0 to {max(ACTIVATIONS)} works")
    return ACTIVATIONS[numbers.pop()]


def is_scaled(settings: Numbers, width: int, where: str) -> bool:
    """A whole number says yes or no to the factor √width; any other is the factor itself."""
    given = [settings.get(f"{stack}/scale_embeddings", 1) for stack in ("encoder", "decoder")]
    factors = {(math.sqrt(width) if scale else 1.0) if isinstance(scale, int) else scale for scale in given}
    for scaled, factor in ((True, math.sqrt(width)), (False, 1.0)):
        if all(math.isclose(factor, other, rel_tol=1e-6) for other in factors):
            return scaled
    raise ClearheadError(
        f"{where}: embeddings are scaled by {sorted(factors)}; Marian models have √width or 1 in both stacks"
    )


# --- names

SELF, CROSS = ("attention.query", "attention.key", "attention.value"), ("cross_attention.key", "cross_attention.value")
LINEARS = {
    "self_attention/linear_0": SELF,
    "self_attention/linear_1": ("attention.output",),
    "attention/linear_0": ("cross_attention.query",),
    "attention/linear_1": CROSS,
    "attention/linear_2": ("cross_attention.output",),
    "ffn/linear_0": ("feed_forward.up",),
    "ffn/linear_1": ("feed_forward.down",),
}
NORMS = {
    "self_attention": "attention_residual",
    "attention": "cross_attention_residual",
    "ffn": "feed_forward_residual",
}
NAMES: Table = {
    TABLE: "encoder.embedding.tokens.weight",
    **{
        f"{stack}/layer_{{layer}}/{theirs}/{leaf}": Fused(
            tuple(f"{stack}.layers.{{layer}}.{part}.{leaf}" for part in ours)
        )
        for stack in ("encoder", "decoder")
        for theirs, ours in LINEARS.items()
        for leaf in ("weight", "bias")
    },
    **{
        f"{stack}/layer_{{layer}}/{theirs}/layer_norm/{leaf}": f"{stack}.layers.{{layer}}.{ours}.norm.{own}"
        for stack in ("encoder", "decoder")
        for theirs, ours in NORMS.items()
        for leaf, own in (("gamma", "weight"), ("beta", "bias"))
    },
    LOGIT_BIAS: "head.bias",
}
DROPPED = (r"(encoder|decoder)/position_encodings/encodings",)  # sinusoids, recomputed; the loader compares them
