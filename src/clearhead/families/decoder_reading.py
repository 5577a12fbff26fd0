"""Read config.json by a row of the decoder tables.

config = read_decoder(MIXTRAL, Settings(json_data, "config.json"))
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from clearhead.architecture import (
    AttentionPattern,
    Causal,
    Embedding,
    Experts,
    FeedForward,
    GroupedAttention,
    Head,
    HeadNorm,
    Layer,
    LayerNorm,
    ModelConfig,
    NoPosition,
    Rope,
    SlidingWindow,
    Stack,
)
from clearhead.errors import ClearheadError
from clearhead.families.decoder_row import FULL, REQUIRED, WINDOWED, BranchNorm, DecoderRow, Rotary, Setting
from clearhead.families.family import look_up_layer_type
from clearhead.families.rope import read_rope, read_scaling, rope_parameters, rope_parameters_of_type
from clearhead.families.settings import Settings


def read_decoder(row: DecoderRow, settings: Settings) -> ModelConfig:
    """Return the config that a config.json of this model type describes."""
    settings = _with_defaults(row, row.prepare(settings))
    for name, values in row.refused.items():
        settings.allow_only(name, *values)
    width, context = settings.integer(row.width.name), settings.integer(row.context.name)
    num_layers = settings.integer(row.num_layers.name)
    norm = _read_norm(row, settings)
    placement = _read(settings, row.placement, "value")
    branch_scale = _read(settings, row.branch_scale, "number")
    layers = tuple(
        Layer(attention=attention, feed_forward=dense, norm=norm, placement=placement, branch_scale=branch_scale)
        for attention, dense in zip(
            _read_attentions(row, settings, norm), _read_feed_forwards(row, settings, width, num_layers), strict=True
        )
    )
    has_final_norm = placement != "post" and _read(settings, row.has_final_norm, "boolean")
    by_width = _read(settings, row.scaled_by_width, "boolean")
    embedding = Embedding(
        vocab_size=settings.integer(row.vocab_size.name),
        scale=width**0.5 if by_width else _read(settings, row.embedding_scale, "number"),
        positions=row.positions(context) if row.positions else None,
    )
    head = Head(
        tied=settings.boolean(row.tied.name, False),
        bias=row.head_bias,
        scale=_read(settings, row.head_scale, "number"),
        softcap=_read(settings, row.head_softcap, "number"),
    )
    stack = Stack(embedding=embedding, layers=layers, final_norm=norm if has_final_norm else None)
    return ModelConfig(width=width, context=context, decoder=stack, head=head)


def _with_defaults(row: DecoderRow, settings: Settings) -> Settings:
    """Return the settings with what the absence of a setting means to transformers; a null stays null."""
    defaults = {part.name: part.default for part in row.settings if part.default is not REQUIRED}
    return Settings({**defaults, **row.defaults, **settings.data}, settings.where)


def _read(settings: Settings, part: Any, kind: str) -> Any:
    """Return a fixed value as it is, or the value of a setting; None, or False for a boolean, if the setting is null.

    `kind` is the method of Settings that checks the type, or "value" for a setting with a list of choices.
    """
    if not isinstance(part, Setting):
        return part
    if part.name not in settings:
        return False if kind == "boolean" else None
    kind = part.kind or kind
    if kind == "value":
        return part.read(settings.data[part.name])
    return part.read(settings.boolean(part.name, False) if kind == "boolean" else getattr(settings, kind)(part.name))


def _read_norm(row: DecoderRow, settings: Settings) -> BranchNorm:
    norm = row.norm(settings.number(row.epsilon.name) if isinstance(row.epsilon, Setting) else row.epsilon)
    if isinstance(norm, LayerNorm) and not _read(settings, row.has_norm_weights, "boolean"):
        return replace(norm, weight=False, bias=False)
    return norm


# --- attention


def _read_attentions(row: DecoderRow, settings: Settings, norm: BranchNorm) -> list[GroupedAttention]:
    num_layers, num_heads = settings.integer(row.num_layers.name), settings.integer(row.num_heads.name, at_least=1)
    width = settings.integer(row.width.name)
    head_width = _read(settings, row.head_width, "integer")
    if head_width is None and width % num_heads and row.head_width is None:
        raise ClearheadError(
            f"{settings.where}: the width {width} cannot be divided among {num_heads} heads; "
            "use a number of heads that divides it"
        )
    head_width = width // num_heads if head_width is None else head_width
    attention = partial(
        GroupedAttention,
        num_heads=num_heads,
        num_kv_heads=_read(settings, row.num_kv_heads, "integer") or num_heads,
        head_width=head_width,
        input_bias=_read(settings, row.input_bias, "boolean"),
        output_bias=_read(settings, row.output_bias, "boolean"),
        scale=_read(settings, row.score_scale, "number"),
        softcap=_read(settings, row.softcap, "number"),
        clip=_read(settings, row.clip, "number"),
        head_norm=_read_head_norm(row, settings, norm),
        sinks=row.sinks,
    )
    return [
        attention(position=position, pattern=pattern)
        for position, pattern in _read_positions(row, settings, num_layers, head_width)
    ]


def _read_head_norm(row: DecoderRow, settings: Settings, norm: BranchNorm) -> HeadNorm | None:
    if row.head_norm is None or not _read(settings, row.head_norm.when, "boolean"):
        return None
    norm = row.head_norm.norm(norm.epsilon) if row.head_norm.norm else norm
    return HeadNorm(norm=norm, scope=row.head_norm.scope, after_rotation=row.head_norm.after_rotation)


def _read_positions(
    row: DecoderRow, settings: Settings, num_layers: int, head_width: int
) -> list[tuple[Rope | NoPosition, AttentionPattern]]:
    """Return the position and the pattern of each layer."""
    if row.windows is None:
        position = _read_rotary(row, settings, FULL, head_width)
        return [(position, Causal())] * num_layers
    size, default_types = row.windows.size.name, row.windows.default_types
    if default_types is None:
        layer_types: list[Any] = [WINDOWED if size in settings else FULL] * num_layers
    else:
        layer_types = settings.per_layer("layer_types", num_layers) or default_types(settings, num_layers)
    rotates_full = row.windows.rotates == "all" or (row.windows.rotates == "windowed_if_any" and size not in settings)
    meanings: dict[str, tuple[Rope | NoPosition, AttentionPattern]] = {
        FULL: (_read_rotary(row, settings, FULL, head_width) if rotates_full else NoPosition(), Causal())
    }
    if WINDOWED in layer_types:
        window = SlidingWindow(size=settings.integer(size))
        meanings[WINDOWED] = (_read_rotary(row, settings, WINDOWED, head_width), window)
    return [look_up_layer_type(meanings, name, settings) for name in layer_types]


def _read_rotary(row: DecoderRow, settings: Settings, layer_type: str, head_width: int) -> Rope | NoPosition:
    rotary, context = row.rotary, settings.integer(row.context.name)
    if rotary is None:
        return NoPosition()
    if rotary.width is not None:
        width = settings.integer(rotary.width.name)
        return Rope(theta=rotary.theta, width=None if width == head_width else width, pairing=rotary.pairing)
    if rotary.by_layer_type:
        return _read_rotary_of_type(rotary, settings, layer_type, context)
    options: dict[str, Any] = {"pairing": rotary.pairing}
    if rotary.partial is not None:
        outside = settings.number(rotary.partial_name, rotary.partial)
        share = rope_parameters(settings).number("partial_rotary_factor", outside)
        if not 0 <= share <= 1:
            raise ClearheadError(f"{settings.where}: the rotary share of a head is {share:g}; it must be from 0 to 1")
        width = int(head_width * share)
        options["width"] = None if width == head_width else width
    theta = settings.number(rotary.theta_name, rotary.theta)
    without_theta = Settings({**settings.data, "rope_theta": None}, settings.where)
    return read_rope(without_theta, context, theta, **options)


def _read_rotary_of_type(rotary: Rotary, settings: Settings, layer_type: str, context: int) -> Rope:
    """Return the rotary positions of one layer type; in older files, the settings are those of full layers."""
    is_full = layer_type == FULL
    parameters = rope_parameters_of_type(settings, layer_type, merge_scaling=is_full)
    theta = settings.number(rotary.theta_name, rotary.theta) if is_full else rotary.theta
    parameters.allow_only("partial_rotary_factor", 1.0)
    theta = parameters.number("rope_theta", theta)
    return Rope(theta=theta, pairing=rotary.pairing, scaling=read_scaling(parameters, context))


# --- feed-forward


def _read_feed_forwards(
    row: DecoderRow, settings: Settings, width: int, num_layers: int
) -> Sequence[FeedForward | Experts]:
    if row.experts is not None:
        return row.experts.read(settings, num_layers)
    default_width = 4 * width if row.feed_forward.default is None else None
    dense = FeedForward(
        width=settings.integer(row.feed_forward.name, default_width),
        activation=settings.activation(row.activation.name),
        gated=row.gated,
        bias=_read(settings, row.feed_forward_bias, "boolean"),
    )
    return [dense] * num_layers
