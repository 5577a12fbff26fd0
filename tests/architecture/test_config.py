"""Configs are checked at birth: every refusal with its sentence, and what may be written down."""

import math
from dataclasses import MISSING, FrozenInstanceError, fields, is_dataclass, replace
from types import NoneType
from typing import get_args, get_type_hints

import pytest

from clearhead.architecture import config, parts
from clearhead.architecture.branches import ExpertGroups, Experts, FeedForward, Router
from clearhead.architecture.config import (
    Dropout,
    Embedding,
    GroupedAttention,
    Head,
    HeadTransform,
    ModelConfig,
    NormalInitial,
    QueryTemperature,
    RotatedHeadNorm,
    ScoreTemperature,
    Stack,
)
from clearhead.architecture.parts import (
    Alibi,
    Bidirectional,
    Causal,
    Chunked,
    DeviationNorm,
    DynamicScaling,
    LayerNorm,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    RelativeBuckets,
    RmsNorm,
    Rope,
    SinusoidalPositions,
    SlidingWindow,
    YarnScaling,
)
from clearhead.config import from_json, to_json
from clearhead.errors import ClearheadError
from tests.model.toys import INNER, NORM, decoder, encoder, grouped, latent, layer, stack, translator

PARTS = [
    part
    for room in (parts, config)
    for part in vars(room).values()
    if isinstance(part, type) and is_dataclass(part) and part.__module__ == room.__name__
]
SOFTMAX = Router(score="softmax")
EXPERTS = Experts(num_experts=8, num_chosen=2, expert=FeedForward(width=8, activation="silu"), router=SOFTMAX)
ACROSS = grouped(pattern=Bidirectional())
LLAMA3 = Llama3Scaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=64)
YARN = YarnScaling(factor=8.0, original_context=64, attention_factor=1.0)
YES = {"num_heads": 4, "num_kv_heads": 2, "head_width": 8}

# One whole example of each part that holds numbers, to spoil a number at a time.
EXAMPLES = [
    RmsNorm(epsilon=1e-5),
    LayerNorm(epsilon=1e-5),
    DeviationNorm(epsilon=1e-5),
    LearnedPositions(num_positions=8, offset=2),
    LinearScaling(factor=2.0),
    DynamicScaling(factor=2.0, original_context=8),
    LLAMA3,
    YARN,
    Rope(theta=10000.0, width=4),
    RelativeBuckets(),
    Alibi(),
    SlidingWindow(size=3),
    Chunked(size=3),
    RotatedHeadNorm(epsilon=1e-5),
    QueryTemperature(floor=8, scale=0.1),
    ScoreTemperature(length=8),
    grouped(value_width=3, softcap=30.0, clip=8.0, scale=0.5),
    latent(scale=0.5),
    INNER,
    ExpertGroups(num_groups=4, num_kept=2, scored_by="max"),
    Router(score="softmax", softcap=30.0, renormalize_epsilon=1e-20),
    EXPERTS,
    Embedding(vocab_size=10, num_token_types=2),
    Head(softcap=30.0),
    NormalInitial(),
    decoder(),
]
NUMBERS = [
    (example, item.name)
    for example in EXAMPLES
    for item in fields(example)
    if type(getattr(example, item.name)) in (int, float)
]
WORDS = [
    (example, item.name)
    for example in (*EXAMPLES, SinusoidalPositions(), layer(grouped()), HeadTransform(activation="gelu", norm=NORM))
    for item in fields(example)
    if isinstance(getattr(example, item.name), str)
]


def named(pair):
    return f"{type(pair[0]).__name__}.{pair[1]}" if isinstance(pair, tuple) else None


def test_every_number_and_every_choice_has_an_example():
    numbers, words = {named(pair) for pair in NUMBERS}, {named(pair) for pair in WORDS}
    for part in PARTS:
        for name, hint in get_type_hints(part).items():
            options = {hint, *get_args(hint)}
            if options & {int, float} and part is not Dropout:
                assert f"{part.__name__}.{name}" in numbers
            if any(isinstance(option, str) for option in options):
                assert f"{part.__name__}.{name}" in words


@pytest.mark.parametrize("pair", NUMBERS, ids=named)
def test_every_number_is_finite_and_not_negative(pair):
    example, name = pair
    kinds = [0, -1, -0.5, math.inf, -math.inf, math.nan]
    for value in kinds[1:] if name in example.MAY_BE_ZERO else kinds:
        with pytest.raises(ClearheadError):
            replace(example, **{name: value})
    if name in example.MAY_BE_ZERO:
        assert getattr(replace(example, **{name: 0}), name) == 0


@pytest.mark.parametrize("pair", WORDS, ids=named)
def test_every_choice_is_one_of_its_choices(pair):
    example, name = pair
    right = getattr(example, name)
    with pytest.raises(ClearheadError, match=f"unknown {named(pair)} '{right}x'; did you mean '{right}'"):
        replace(example, **{name: right + "x"})
    for choice in get_args(get_type_hints(type(example))[name]):
        assert getattr(replace(example, **{name: choice}), name) == choice


def experts_in(groups: ExpertGroups, **changes: int) -> Experts:
    return replace(EXPERTS, router=replace(SOFTMAX, groups=groups), **changes)


REFUSED = {
    "heads that do not share evenly": (
        lambda: GroupedAttention(**YES | {"num_heads": 6, "num_kv_heads": 4}),
        "num_heads 6 is not a multiple of num_kv_heads 4",
    ),
    "rope of odd width": (lambda: GroupedAttention(**YES, position=Rope(width=5)), "width 5 must be even"),
    "rope of an odd head": (
        lambda: GroupedAttention(**YES | {"head_width": 7}, position=Rope()),
        "width 7 must be even",
    ),
    "rope wider than the head": (
        lambda: GroupedAttention(**YES, position=Rope(width=10)),
        "at most the 8 entries of a head",
    ),
    "dynamic rope of one pair": (
        lambda: GroupedAttention(**YES, position=Rope(width=2, scaling=DynamicScaling(factor=2.0, original_context=8))),
        "DynamicScaling keeps the first pair",
    ),
    "rope that does not slow down": (lambda: Rope(theta=1.0), "frequencies fall only if it exceeds 1"),
    "latent rope of another width": (
        lambda: latent(rotary_width=4, rope=Rope(width=2)),
        "rope's width 2 must be rotary_width 4",
    ),
    "latent rope of odd width": (lambda: latent(rotary_width=3), "width 3 must be even"),
    "too few buckets": (lambda: RelativeBuckets(num_buckets=1), "num_buckets is 1; too few"),
    "too few buckets for both ways": (
        lambda: RelativeBuckets(num_buckets=3, bidirectional=True),
        "num_buckets is 3; too few",
    ),
    "buckets beyond the distance": (lambda: RelativeBuckets(max_distance=16), "must exceed the 16 exact buckets"),
    "a temperature without logarithm": (lambda: ScoreTemperature(length=1), "logarithm must exceed 0"),
    "more groups kept than there are": (
        lambda: ExpertGroups(num_groups=2, num_kept=3, scored_by="max"),
        "keeps 3 of 2 groups",
    ),
    "more experts chosen than there are": (lambda: replace(EXPERTS, num_chosen=9), "num_chosen is 9 of 8 experts"),
    "experts with a bias": (
        lambda: replace(EXPERTS, expert=FeedForward(width=8, activation="silu", bias=True)),
        "experts have no bias",
    ),
    "groups that do not divide": (
        lambda: experts_in(ExpertGroups(num_groups=3, num_kept=1, scored_by="max")),
        "8 experts do not divide into 3 groups",
    ),
    "groups too small for their score": (
        lambda: experts_in(ExpertGroups(num_groups=8, num_kept=4, scored_by="top2_sum")),
        "need two experts each",
    ),
    "groups too small for the choice": (
        lambda: experts_in(ExpertGroups(num_groups=4, num_kept=1, scored_by="max"), num_chosen=3),
        "kept groups hold fewer than num_chosen 3",
    ),
    "parallel with cross-attention": (
        lambda: layer(grouped(), cross_attention=ACROSS, placement="parallel"),
        "parallel layer has no place",
    ),
    "causal cross-attention": (
        lambda: layer(grouped(), cross_attention=grouped(pattern=Causal())),
        "cross-attention takes position NoPosition and pattern Bidirectional",
    ),
    "cross-attention with positions": (
        lambda: layer(grouped(), cross_attention=replace(ACROSS, position=Rope())),
        "cross-attention takes position NoPosition",
    ),
    "a stack of nothing": (
        lambda: Stack(embedding=Embedding(vocab_size=4), layers=()),
        "needs at least one layer",
    ),
    "two tables of buckets in a stack": (
        lambda: Stack(
            embedding=Embedding(vocab_size=4),
            layers=tuple(layer(grouped(position=RelativeBuckets(num_buckets=number))) for number in (8, 16)),
        ),
        "share one RelativeBuckets table",
    ),
    "dropout of all": (lambda: Dropout(residual=1.0), "Dropout.residual is 1.0; it must be at least 0 and below 1"),
    "negative dropout": (lambda: Dropout(embedding=-0.1), "Dropout.embedding is -0.1"),
    "dropout of nobody knows": (lambda: Dropout(attention=math.nan), "Dropout.attention is nan"),
    "no stack": (lambda: ModelConfig(width=4, context=4), "needs an encoder or a decoder"),
    "sharing with nobody": (lambda: replace(decoder(), share_embeddings=True), "needs an encoder and a decoder"),
    "a decoder that looks at no encoder": (
        lambda: replace(decoder(), decoder=stack(grouped(), cross_attention=ACROSS)),
        "decoder layer 0 must not have cross_attention",
    ),
    "a decoder that misses its encoder": (
        lambda: replace(decoder(), encoder=encoder().encoder),
        "decoder layer 0 must have cross_attention",
    ),
    "an encoder that looks across": (
        lambda: replace(encoder(), encoder=stack(ACROSS, cross_attention=ACROSS)),
        "encoder layer 0 must not have cross_attention",
    ),
    "sharing between two vocabularies": (
        lambda: translator(
            share_embeddings=True, encoder=replace(translator().encoder, embedding=Embedding(vocab_size=5))
        ),
        r"equal vocabularies, not \(5, 29\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_mix_is_refused_at_birth(name):
    build, sentence = REFUSED[name]
    with pytest.raises(ClearheadError, match=sentence):
        build()


def test_the_smallest_of_everything_is_allowed():
    GroupedAttention(num_heads=1, num_kv_heads=1, head_width=2, position=Rope())
    RelativeBuckets(num_buckets=2, max_distance=2)
    RelativeBuckets(num_buckets=4, max_distance=2, bidirectional=True)
    experts_in(ExpertGroups(num_groups=4, num_kept=2, scored_by="top2_sum"), num_chosen=4)
    replace(EXPERTS, num_chosen=8)
    Dropout(residual=0.999)
    translator(share_embeddings=True)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_parts_are_frozen_and_named(part):
    """No position of an argument means anything, and no part changes after its birth."""
    assert part.__dataclass_params__.frozen
    assert all(item.kw_only for item in fields(part))


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_what_may_be_absent_is_absent_by_default(part):
    """None is left out where a config is written: so None must be what reading it back gives."""
    hints = get_type_hints(part)
    for item in fields(part):
        if NoneType in get_args(hints[item.name]):
            required = item.default is MISSING and item.default_factory is MISSING
            assert not required
            assert item.default is None


def test_parts_are_values():
    assert translator() == translator()
    assert hash(translator()) == hash(translator())
    assert len({grouped(), grouped(), latent(), grouped(softcap=1.0)}) == 3
    with pytest.raises(FrozenInstanceError):
        grouped().num_heads = 8


def test_layers_in_a_list_are_the_same_stack():
    model = decoder()
    listed = replace(model, decoder=replace(model.decoder, layers=list(model.decoder.layers)))
    assert listed == model
    assert from_json(ModelConfig, to_json(listed)) == model


def test_a_model_knows_its_output_stack():
    assert translator().is_encoder_decoder
    assert not decoder().is_encoder_decoder
    assert not encoder().is_encoder_decoder
    assert translator().output_stack == translator().decoder
    assert encoder().output_stack == encoder().encoder
    other_source = replace(translator(), encoder=replace(translator().encoder, embedding=Embedding(vocab_size=5)))
    assert other_source.vocab_size == translator().decoder.embedding.vocab_size


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: grouped(pattern="causal"),
            "GroupedAttention.pattern is 'causal'; it must be Bidirectional or Causal or",
        ),
        (lambda: Rope(scaling=8.0), "Rope.scaling is 8.0; it must be"),
        (lambda: FeedForward(width=8.0, activation="silu"), "FeedForward.width is 8.0; it must be int"),
        (lambda: FeedForward(width=True, activation="silu"), "FeedForward.width is True; it must be int"),
        (lambda: RmsNorm(epsilon="1e-5"), "RmsNorm.epsilon is '1e-5'; it must be float"),
        (lambda: Dropout(residual="0.1"), "Dropout.residual is '0.1'; it must be float"),
        (lambda: replace(decoder(Rope()), dropout=0.1), "ModelConfig.dropout is 0.1; it must be Dropout"),
        (lambda: replace(decoder(Rope()).decoder, layers=(1,)), r"Stack.layers is \(1,\); it must be a tuple of Layer"),
        (
            lambda: replace(decoder(Rope()).decoder.layers[0], attention=None),
            "Layer.attention is None; it must be GroupedAttention or",
        ),
    ],
)
def test_a_value_of_another_type_is_refused_at_birth(make, sentence):
    with pytest.raises(ClearheadError, match=sentence):
        make()
