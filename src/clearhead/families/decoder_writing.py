"""Write config.json by a row of the decoder tables, and make a Family of a row.

data = _write_decoder(MIXTRAL, config); FAMILY = decoder_family(MIXTRAL)
"""

from functools import partial
from typing import Any

from clearhead.architecture import (
    Causal,
    FeedForward,
    GroupedAttention,
    Head,
    HeadNorm,
    ModelConfig,
    Rope,
    SlidingWindow,
    Stack,
)
from clearhead.families.decoder_reading import read_decoder
from clearhead.families.decoder_row import FULL, WINDOWED, DecoderRow, Rotary, Setting
from clearhead.families.family import Family, Preset, grouped_attentions, require_round_trip, require_type
from clearhead.families.llama_style import IGNORED_TENSORS
from clearhead.families.rope import write_rope
from clearhead.families.settings import NAMES_BY_ACTIVATION, Settings


def decoder_family(row: DecoderRow) -> Family:
    """Return the family of one model type."""
    return Family(
        name=row.model_type,
        presets={name: _preset(row, data) for name, data in row.presets.items()},
        model_types=(row.model_type,),
        read_config=partial(read_decoder, row),
        write_config=partial(_write_decoder, row),
        tensor_names=row.tensor_names,
        base_model_prefix=row.base_model_prefix,
        duplicates={row.head_matrix: row.token_table},
        ignored_tensors=(*IGNORED_TENSORS, *row.ignored_tensors),
    )


def _preset(row: DecoderRow, data: Any) -> Preset:
    return lambda: read_decoder(row, Settings(data, row.model_type))


def _write_decoder(row: DecoderRow, config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of this model type that describes a config."""
    stack, head = require_type(Stack, config.decoder), require_type(Head, config.head)
    layer, attentions = stack.layers[0], grouped_attentions(stack)
    values: list[tuple[Any, Any]] = [
        (row.width, config.width),
        (row.num_layers, len(stack.layers)),
        (row.vocab_size, config.vocab_size),
        (row.context, config.context),
        (row.epsilon, layer.norm.epsilon),
        (row.has_norm_weights, getattr(layer.norm, "weight", True)),
        (row.placement, layer.placement),
        (row.has_final_norm, stack.final_norm is not None),
        (row.branch_scale, layer.branch_scale),
        (row.embedding_scale, stack.token_embedding.scale),
        (row.scaled_by_width, stack.token_embedding.scale != 1.0),
        (row.tied, head.tied),
        (row.head_scale, head.scale),
        (row.head_softcap, head.softcap),
        *_attention_values(row, attentions[0]),
    ]
    if row.experts is None:
        dense = require_type(FeedForward, layer.feed_forward)
        values += [(row.feed_forward, dense.width), (row.feed_forward_bias, dense.bias)]
        values.append((row.activation, NAMES_BY_ACTIVATION[dense.activation]))
    data: dict[str, Any] = {"architectures": [row.architecture], "model_type": row.model_type}
    data |= {part.name: part.write(value) for part, value in values if isinstance(part, Setting)}
    data |= row.experts.write(stack) if row.experts else {}
    data |= _write_windows(row, attentions)
    data |= _write_rotary(row.rotary, attentions) if row.rotary else {}
    return require_round_trip(row.finish(data), config, partial(read_decoder, row))


def _attention_values(row: DecoderRow, attention: GroupedAttention) -> list[tuple[Any, Any]]:
    return [
        (row.num_heads, attention.num_heads),
        (row.num_kv_heads, attention.num_kv_heads),
        (row.head_width, attention.head_width),
        (row.input_bias, attention.input_bias),
        (row.output_bias, attention.output_bias),
        (row.score_scale, _score_scale(row, attention)),
        (row.softcap, attention.softcap),
        (row.clip, attention.clip),
        (row.head_norm and row.head_norm.when, isinstance(attention.head_norm, HeadNorm)),
    ]


def _score_scale(row: DecoderRow, attention: GroupedAttention) -> float | None:
    """Return the scale of the scores; as a number if the setting is one, since transformers refuses null there."""
    is_number = row.score_scale is not None and isinstance(row.score_scale.default, float)
    return attention.head_width**-0.5 if is_number and attention.scale is None else attention.scale


def _write_windows(row: DecoderRow, attentions: list[GroupedAttention]) -> dict[str, Any]:
    if row.windows is None:
        return {}
    sizes = [attention.pattern.size for attention in attentions if isinstance(attention.pattern, SlidingWindow)]
    data: dict[str, Any] = {row.windows.size.name: sizes[0]} if sizes else {}
    if row.windows.default_types is not None:
        types = [WINDOWED if isinstance(attention.pattern, SlidingWindow) else FULL for attention in attentions]
        data["layer_types"] = types
    rotates_all = all(isinstance(attention.position, Rope) for attention in attentions)
    null_has_meaning = row.windows.default_types is None or (row.windows.rotates == "windowed_if_any" and rotates_all)
    if not sizes and null_has_meaning:  # where it has none, transformers needs a number
        data[row.windows.size.name] = None
    return data


def _write_rotary(rotary: Rotary, attentions: list[GroupedAttention]) -> dict[str, Any]:
    ropes = {type(attention.pattern): attention for attention in reversed(attentions)}
    ropes = {kind: attention for kind, attention in ropes.items() if isinstance(attention.position, Rope)}
    if not ropes:
        return {}
    if rotary.by_layer_type:
        names = {WINDOWED: ropes.get(SlidingWindow), FULL: ropes.get(Causal)}
        entries = {name: write_rope(require_type(Rope, part.position)) for name, part in names.items() if part}
        return {"rope_parameters": entries}
    attention = next(iter(ropes.values()))
    rope = require_type(Rope, attention.position)
    if rotary.width is not None:
        return {rotary.width.name: rope.width or attention.head_width}
    data = write_rope(rope)
    if rotary.partial is not None:
        data["partial_rotary_factor"] = (rope.width or attention.head_width) / attention.head_width
    return {"rope_parameters": data}
