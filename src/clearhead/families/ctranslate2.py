"""Marian models in CTranslate2's format: translate their settings to a config and their tensor names to ours.

    config = marian_config(settings, shapes, where="model.bin"); names = CTRANSLATE2_MARIAN.tensor_names

Self-attention stores query, key and value as one matrix; cross-attention stores key and value as one. Marian's
decoder starts from a zero vector. Like transformers, we use one more token for it, whose row in the table is zero.
Sources, in github.com/OpenNMT/CTranslate2: specs/transformer_spec.py, specs/common_spec.py (activations) and, for
the meaning of a missing setting, src/layers/transformer.cc and src/layers/common.cc.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from clearhead.architecture import Activation, ModelConfig
from clearhead.errors import ClearheadError
from clearhead.families.bart import StackSize, bart_config
from clearhead.families.tensor_rules import Fused, NameTable

Numbers = Mapping[str, int | float]
Shapes = Mapping[str, tuple[int, ...]]

TOKEN_TABLE, _LOGIT_BIAS = "decoder/embeddings/weight", "decoder/projection/bias"
POSITIONS = {stack: f"{stack}/position_encodings/encodings" for stack in ("encoder", "decoder")}
# CTranslate2's number of an activation -> ours
ACTIVATIONS: dict[int, Activation] = {
    0: "relu",
    1: "gelu_tanh",
    2: "silu",
    3: "gelu",
    4: "gelu_quick",
    5: "tanh",
}
# Setting -> (the value of every Marian model, the value that a missing setting means)
_FIXED = {
    "encoder/pre_norm": (0, 1),
    "decoder/pre_norm": (0, 1),
    "decoder/alibi": (0, 0),
    "encoder/multi_query_attention": (0, 0),
    "decoder/start_from_zero_embedding": (1, 0),
}
_READ = tuple(
    f"{stack}/{name}" for stack in ("encoder", "decoder") for name in ("num_heads", "activation", "scale_embeddings")
)
WITHOUT_EFFECT = (
    r"decoder/alignment_(layer|heads)",  # selects the attention weights to display
    r"decoder/(alibi_use_positive_positions|scale_alibi)",  # Marian models do not use ALiBi
    r"encoder/embeddings_merge",  # there is only one embedding
    r".*/keep_in_float32",  # concerns quantization
)


def marian_config(settings: Numbers, shapes: Shapes, where: str) -> ModelConfig:
    """Return the config of a Marian model; `shapes` must contain at least the biases and position encodings."""
    _check_settings(settings, where)
    width = _tensor_size("encoder/layer_0/ffn/linear_1/bias", shapes, where)
    return bart_config(
        "marian",
        width=width,
        encoder=_stack_size("encoder", settings, shapes, where),
        decoder=_stack_size("decoder", settings, shapes, where),
        vocab_size=_tensor_size(_LOGIT_BIAS, shapes, where) + 1,  # one more for the token to start from
        context=min(_tensor_size(name, shapes, where) for name in POSITIONS.values()),
        activation=read_activation(settings, where),
        scaled=is_scaled(settings, width, where),
    )


def _check_settings(settings: Numbers, where: str) -> None:
    """Raise ClearheadError if a setting is unknown or has a value that Marian models do not have."""
    for name, (required, default) in _FIXED.items():
        if settings.get(name, default) != required:
            raise ClearheadError(f"{where}: {name} is {settings.get(name, default)}; Marian models have {required}")
    known = re.compile("|".join((*_FIXED, *_READ, *WITHOUT_EFFECT)))
    for name, value in settings.items():
        if not known.fullmatch(name):
            raise ClearheadError(f"{where}: {name} is {value}, which Marian models do not have")


def _stack_size(stack: str, settings: Numbers, shapes: Shapes, where: str) -> StackSize:
    num_layers = 0
    while f"{stack}/layer_{num_layers}/ffn/linear_0/bias" in shapes:
        num_layers += 1
    return StackSize(
        num_layers=num_layers,
        num_heads=_read_integer(f"{stack}/num_heads", settings, where),
        feed_forward=_tensor_size(f"{stack}/layer_0/ffn/linear_0/bias", shapes, where),
    )


def _tensor_size(name: str, shapes: Shapes, where: str) -> int:
    """Return the first dimension of a tensor."""
    if name not in shapes:
        raise ClearheadError(f"{where} lacks the tensor {name}, which Marian models have")
    return shapes[name][0]


def _read_integer(name: str, settings: Numbers, where: str) -> int:
    value = settings.get(name)
    if not isinstance(value, int):
        raise ClearheadError(f"{where} must have a whole number as {name}, not {value}")
    return value


def read_activation(settings: Numbers, where: str) -> Activation:
    """Return the activation that both stacks use."""
    numbers = {_read_integer(f"{stack}/activation", settings, where) for stack in ("encoder", "decoder")}
    if len(numbers) > 1 or not numbers <= set(ACTIVATIONS):
        shown = " and ".join(map(str, sorted(numbers)))
        raise ClearheadError(
            f"{where}: the activation is number {shown}; it must be one number from 0 to {max(ACTIVATIONS)}"
        )
    return ACTIVATIONS[numbers.pop()]


def is_scaled(settings: Numbers, width: int, where: str) -> bool:
    """Return whether embeddings are multiplied by √width.

    A whole number switches the factor √width on or off; any other number is the factor itself.
    """
    values = [settings.get(f"{stack}/scale_embeddings", 1) for stack in ("encoder", "decoder")]
    factors = {(math.sqrt(width) if value else 1.0) if isinstance(value, int) else value for value in values}
    for scaled, factor in ((True, math.sqrt(width)), (False, 1.0)):
        if all(math.isclose(factor, other, rel_tol=1e-6) for other in factors):
            return scaled
    raise ClearheadError(
        f"{where}: embeddings are scaled by {sorted(factors)}; Marian models scale by √width or 1 in both stacks"
    )


# --- tensor names

_LINEARS = {
    "self_attention/linear_0": ("attention.query", "attention.key", "attention.value"),
    "self_attention/linear_1": ("attention.output",),
    "attention/linear_0": ("cross_attention.query",),
    "attention/linear_1": ("cross_attention.key", "cross_attention.value"),
    "attention/linear_2": ("cross_attention.output",),
    "ffn/linear_0": ("feed_forward.up",),
    "ffn/linear_1": ("feed_forward.down",),
}
NORMS = {
    "self_attention": "attention_residual",
    "attention": "cross_attention_residual",
    "ffn": "feed_forward_residual",
}
_TENSOR_NAMES: NameTable = {
    TOKEN_TABLE: "encoder.embedding.tokens.weight",
    **{
        f"{stack}/layer_{{layer}}/{theirs}/{leaf}": Fused(
            tuple(f"{stack}.layers.{{layer}}.{part}.{leaf}" for part in ours)
        )
        for stack in ("encoder", "decoder")
        for theirs, ours in _LINEARS.items()
        for leaf in ("weight", "bias")
    },
    **{
        f"{stack}/layer_{{layer}}/{theirs}/layer_norm/{their_leaf}": f"{stack}.layers.{{layer}}.{ours}.norm.{our_leaf}"
        for stack in ("encoder", "decoder")
        for theirs, ours in NORMS.items()
        for their_leaf, our_leaf in (("gamma", "weight"), ("beta", "bias"))
    },
    _LOGIT_BIAS: "head.bias",
}


@dataclass(frozen=True)
class _CTranslate2Layout:
    """Names of the tensors in a CTranslate2 file, and which of them are ours."""

    tensor_names: NameTable
    ignored_tensors: tuple[str, ...]
    token_table: str
    logit_bias: str
    positions: Mapping[str, str]  # "encoder" or "decoder" -> the table of position encodings
    aliases: Mapping[str, str]  # name that must be an alias -> the tensor that it stands for


CTRANSLATE2_MARIAN = _CTranslate2Layout(
    tensor_names=_TENSOR_NAMES,
    ignored_tensors=tuple(POSITIONS.values()),  # sinusoids: computed, and compared with the file by the loader
    token_table=TOKEN_TABLE,
    logit_bias=_LOGIT_BIAS,
    positions=POSITIONS,
    aliases={"decoder/projection/weight": TOKEN_TABLE, "encoder/embeddings_0/weight": TOKEN_TABLE},
)
