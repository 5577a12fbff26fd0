"""Configs are validated on construction: every error message, and what is allowed."""

import math
from dataclasses import MISSING, FrozenInstanceError, fields, is_dataclass, replace
from types import NoneType
from typing import get_args, get_origin, get_type_hints

import pytest

from clearhead import architecture
from clearhead.architecture import (
    Alibi,
    AudioEmbedding,
    Bidirectional,
    Causal,
    CenteredWindow,
    Chunked,
    Classifier,
    DeviationNorm,
    Disentangled,
    Dropout,
    DynamicScaling,
    Embedding,
    ExpertGroups,
    Experts,
    FeedForward,
    GateClamp,
    GroupedAttention,
    Head,
    HeadNorm,
    HeadTransform,
    LayerNorm,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    NormalInitial,
    Projection,
    QueryTemperature,
    RelativeBuckets,
    RmsNorm,
    Rope,
    RotatedHeadNorm,
    Router,
    ScoreTemperature,
    SentenceConfig,
    SinusoidalPositions,
    SlidingWindow,
    Stack,
    VectorNorm,
    YarnScaling,
)
from clearhead.config import from_json, to_json
from clearhead.errors import ClearheadError
from tests.model.toys import FEED_FORWARD, NORM, decoder, encoder, grouped, latent, layer, stack, translator

DISTANCES = Disentangled(num_buckets=16, max_distance=32, norm=LayerNorm(epsilon=1e-5))
CONFIG_CLASSES = [
    value
    for value in (getattr(architecture, name) for name in architecture.__all__)
    if isinstance(value, type) and is_dataclass(value)
]
SOFTMAX = Router(score="softmax")
EXPERTS = Experts(num_experts=8, num_chosen=2, expert=FeedForward(width=8, activation="silu"), router=SOFTMAX)
CROSS_ATTENTION = grouped(pattern=Bidirectional())
LLAMA3 = Llama3Scaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=64)
YARN = YarnScaling(factor=8.0, original_context=64, attention_factor=1.0)
VALID = {"num_heads": 4, "num_kv_heads": 2, "head_width": 8}

# One complete example of each config with numbers; the tests make one number at a time invalid.
EXAMPLES = [
    RmsNorm(epsilon=1e-5),
    LayerNorm(epsilon=1e-5),
    DeviationNorm(epsilon=1e-5),
    LearnedPositions(num_positions=8, offset=2),
    LinearScaling(factor=2.0),
    DynamicScaling(factor=2.0, original_context=8),
    LLAMA3,
    YARN,
    LongRopeScaling(short_factors=(1.0,), long_factors=(2.0,), original_context=8, attention_factor=1.0),
    SinusoidalPositions(),
    Rope(theta=10000.0, width=4),
    RelativeBuckets(),
    Alibi(),
    SlidingWindow(size=3),
    Chunked(size=3),
    CenteredWindow(reach=2),
    Classifier(num_labels=3, reads="first"),
    Disentangled(num_buckets=8, max_distance=16, norm=LayerNorm(epsilon=1e-5)),
    Projection(input_width=4, width=3, activation="tanh"),
    VectorNorm(width=3, epsilon=1e-5),
    SentenceConfig(width=4, dimensions=2, max_tokens=8),
    RotatedHeadNorm(epsilon=1e-5),
    QueryTemperature(floor=8, scale=0.1),
    ScoreTemperature(length=8),
    grouped(value_width=3, softcap=30.0, clip=8.0, scale=0.5),
    latent(scale=0.5),
    FEED_FORWARD,
    GateClamp(limit=7.0),
    HeadNorm(norm=RmsNorm(epsilon=1e-5)),
    layer(grouped()),
    ExpertGroups(num_groups=4, num_kept=2, scored_by="max"),
    Router(score="softmax", softcap=30.0, renormalize_epsilon=1e-20),
    EXPERTS,
    Embedding(vocab_size=10, num_token_types=2, width=4),
    AudioEmbedding(num_mel_bands=8, num_positions=10),
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
CHOICES = [
    (example, item.name)
    for example in (*EXAMPLES, HeadTransform(activation="gelu", norm=NORM))
    for item in fields(example)
    if isinstance(getattr(example, item.name), str)
]


def field_name(pair):
    """Return the test id of an (example, field) pair, such as "Rope.theta"."""
    return f"{type(pair[0]).__name__}.{pair[1]}" if isinstance(pair, tuple) else None


def test_examples_cover_every_number_and_every_choice():
    numbers, choices = {field_name(pair) for pair in NUMBERS}, {field_name(pair) for pair in CHOICES}
    for config in CONFIG_CLASSES:
        for name, hint in get_type_hints(config).items():
            options = {hint} if get_origin(hint) is tuple else {hint, *get_args(hint)}
            if options & {int, float} and config is not Dropout:
                assert f"{config.__name__}.{name}" in numbers
            if any(isinstance(option, str) for option in options):
                assert f"{config.__name__}.{name}" in choices


@pytest.mark.parametrize("pair", NUMBERS, ids=field_name)
def test_numbers_must_be_finite_and_positive_or_zero_where_allowed(pair):
    example, name = pair
    invalid = [0, -1, -0.5, math.inf, -math.inf, math.nan]
    for value in invalid[1:] if name in example.MAY_BE_ZERO else invalid:
        with pytest.raises(ClearheadError):
            replace(example, **{name: value})
    if name in example.MAY_BE_ZERO:
        assert getattr(replace(example, **{name: 0}), name) == 0


@pytest.mark.parametrize("pair", CHOICES, ids=field_name)
def test_a_misspelled_choice_is_rejected_and_every_listed_choice_accepted(pair):
    example, name = pair
    valid = getattr(example, name)
    with pytest.raises(ClearheadError, match=f"unknown {field_name(pair)} '{valid}x'; did you mean '{valid}'"):
        replace(example, **{name: valid + "x"})
    for choice in get_args(get_type_hints(type(example))[name]):
        if isinstance(example, HeadTransform) and choice == "xielu":
            continue  # it has learned parameters of its own
        assert getattr(replace(example, **{name: choice}), name) == choice


def experts_in(groups: ExpertGroups, **changes: int) -> Experts:
    return replace(EXPERTS, router=replace(SOFTMAX, groups=groups), **changes)


INVALID = {
    "query heads not divisible by key-value heads": (
        lambda: GroupedAttention(**VALID | {"num_heads": 6, "num_kv_heads": 4}),
        "num_heads is 6; it must be a multiple of num_kv_heads 4",
    ),
    "rope with an odd width": (lambda: GroupedAttention(**VALID, position=Rope(width=5)), "width 5 must be even"),
    "rope with an odd head width": (
        lambda: GroupedAttention(**VALID | {"head_width": 7}, position=Rope()),
        "width 7 must be even",
    ),
    "rope wider than the head": (
        lambda: GroupedAttention(**VALID, position=Rope(width=10)),
        "at most the head width 8",
    ),
    "dynamic rope with one pair": (
        lambda: GroupedAttention(
            **VALID, position=Rope(width=2, scaling=DynamicScaling(factor=2.0, original_context=8))
        ),
        "DynamicScaling leaves the first pair unchanged",
    ),
    "rope with constant frequencies": (lambda: Rope(theta=1.0), "must be greater than 1, so that frequencies decrease"),
    "latent attention with a rope of another width": (
        lambda: latent(rotary_width=4, rope=Rope(width=2)),
        "rope.width is 2; it must be None or rotary_width 4",
    ),
    "latent attention with an odd rotary width": (lambda: latent(rotary_width=3), "width 3 must be even"),
    "too few buckets": (lambda: RelativeBuckets(num_buckets=1), "num_buckets is 1; it must be at least 2"),
    "too few bidirectional buckets": (
        lambda: RelativeBuckets(num_buckets=3, bidirectional=True),
        "num_buckets is 3; it must be at least 4",
    ),
    "more exact buckets than max_distance": (
        lambda: RelativeBuckets(max_distance=16),
        "must be greater than 16, the number of exact buckets",
    ),
    "score temperature with length 1": (
        lambda: ScoreTemperature(length=1),
        "ScoreTemperature.length is 1; it must be at least 2",
    ),
    "more groups kept than exist": (
        lambda: ExpertGroups(num_groups=2, num_kept=3, scored_by="max"),
        "num_kept is 3; it must be at most num_groups 2",
    ),
    "more experts chosen than exist": (
        lambda: replace(EXPERTS, num_chosen=9),
        "num_chosen is 9; it must be at most num_experts 8",
    ),
    "experts with xielu": (
        lambda: replace(EXPERTS, expert=FeedForward(width=8, activation="xielu")),
        "xielu has learned parameters of its own",
    ),
    "a gated xielu": (
        lambda: FeedForward(width=8, activation="xielu", gated=True),
        "xielu has learned parameters of its own and takes no gate",
    ),
    "a clamp without a gate": (
        lambda: FeedForward(width=8, activation="silu", clamp=GateClamp(limit=7.0)),
        "a FeedForward without a gate has no clamp",
    ),
    "a gate on no shared expert": (
        lambda: replace(EXPERTS, shared_gate=True),
        "shared_gate multiplies a shared expert",
    ),
    "a bias without a weight": (
        lambda: LayerNorm(epsilon=1e-5, weight=False),
        "a LayerNorm without weight has neither bias nor unit_offset",
    ),
    "a bias of each head's norm": (
        lambda: HeadNorm(norm=LayerNorm(epsilon=1e-5), scope="per_head"),
        "a HeadNorm with scope 'per_head' needs a norm with a weight, without a bias",
    ),
    "a joint norm after the rotation": (
        lambda: HeadNorm(norm=RmsNorm(epsilon=1e-5), scope="joint", after_rotation=True),
        "a HeadNorm with scope 'joint' comes before the rotation",
    ),
    "a norm after no rotation": (
        lambda: grouped(position=Alibi(), head_norm=HeadNorm(norm=RmsNorm(epsilon=1e-5), after_rotation=True)),
        "Alibi rotates nothing; set after_rotation of the HeadNorm to false",
    ),
    "too few factors": (
        lambda: GroupedAttention(
            **VALID,
            position=Rope(
                scaling=LongRopeScaling(
                    short_factors=(1.0,), long_factors=(2.0,), original_context=8, attention_factor=1.0
                )
            ),
        ),
        "LongRopeScaling has 1 factors; a Rope of width 8 needs 4",
    ),
    "factors of different lengths": (
        lambda: LongRopeScaling(short_factors=(1.0,), long_factors=(), original_context=8, attention_factor=1.0),
        "LongRopeScaling needs as many short_factors as long_factors",
    ),
    "experts not divisible by groups": (
        lambda: experts_in(ExpertGroups(num_groups=3, num_kept=1, scored_by="max")),
        "num_experts is 8; it must be a multiple of num_groups 3",
    ),
    "groups too small for top2_sum": (
        lambda: experts_in(ExpertGroups(num_groups=8, num_kept=4, scored_by="top2_sum")),
        "need at least 2 experts each, not 1",
    ),
    "kept groups with fewer experts than are chosen": (
        lambda: experts_in(ExpertGroups(num_groups=4, num_kept=1, scored_by="max"), num_chosen=3),
        "num_chosen is 3; it must be at most 2, the experts in the kept groups",
    ),
    **{
        f"no norm before attention with placement {placement}": (
            lambda placement=placement: layer(grouped(), placement=placement, attention_norm=False),
            f"placement '{placement}' has no norm that only attention reads; set attention_norm to true",
        )
        for placement in ("post", "branch", "parallel")
    },
    "parallel placement with cross-attention": (
        lambda: layer(grouped(), cross_attention=CROSS_ATTENTION, placement="parallel"),
        "placement 'parallel' does not support cross-attention",
    ),
    "causal cross-attention": (
        lambda: layer(grouped(), cross_attention=grouped(pattern=Causal())),
        "cross-attention must have position NoPosition and pattern Bidirectional",
    ),
    "cross-attention with positions": (
        lambda: layer(grouped(), cross_attention=replace(CROSS_ATTENTION, position=Rope())),
        "cross-attention must have position NoPosition",
    ),
    "stack without layers": (
        lambda: Stack(embedding=Embedding(vocab_size=4), layers=()),
        "needs at least one layer",
    ),
    "two relative bias tables in one stack": (
        lambda: Stack(
            embedding=Embedding(vocab_size=4),
            layers=tuple(layer(grouped(position=RelativeBuckets(num_buckets=number))) for number in (8, 16)),
        ),
        "share one table of relative positions",
    ),
    **{
        f"table of distances beside {position}": (
            lambda position=position: Stack(
                embedding=Embedding(vocab_size=4),
                layers=tuple(layer(grouped(position=each)) for each in (DISTANCES, position)),
            ),
            "share one table of relative positions",
        )
        for position in (replace(DISTANCES, num_buckets=8), RelativeBuckets(), RelativeBuckets(per_layer=True))
    },
    "dropout probability 1": (
        lambda: Dropout(residual=1.0),
        "Dropout.residual is 1.0; it must be at least 0 and less than 1",
    ),
    "negative dropout probability": (lambda: Dropout(embedding=-0.1), "Dropout.embedding is -0.1"),
    "dropout probability NaN": (lambda: Dropout(attention=math.nan), "Dropout.attention is nan"),
    "model without a stack": (lambda: ModelConfig(width=4, context=4), "needs an encoder or a decoder"),
    "shared embeddings with one stack": (
        lambda: replace(decoder(), share_embeddings=True),
        "needs an encoder and a decoder",
    ),
    "cross-attention without an encoder": (
        lambda: replace(decoder(), decoder=stack(grouped(), cross_attention=CROSS_ATTENTION)),
        "decoder layer 0 must not have cross_attention",
    ),
    "encoder without cross-attention in the decoder": (
        lambda: replace(decoder(), encoder=encoder().encoder),
        "decoder layer 0 must have cross_attention",
    ),
    "cross-attention in an encoder": (
        lambda: replace(encoder(), encoder=stack(CROSS_ATTENTION, cross_attention=CROSS_ATTENTION)),
        "encoder layer 0 must not have cross_attention",
    ),
    "shared embeddings with different vocabularies": (
        lambda: translator(
            share_embeddings=True, encoder=replace(translator().encoder, embedding=Embedding(vocab_size=5))
        ),
        "share_embeddings needs equal vocabulary sizes, not 5 and 29",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_combination_is_rejected(name):
    build, message = INVALID[name]
    with pytest.raises(ClearheadError, match=message):
        build()


def test_boundary_values_are_accepted():
    GroupedAttention(num_heads=1, num_kv_heads=1, head_width=2, position=Rope())
    RelativeBuckets(num_buckets=2, max_distance=2)
    RelativeBuckets(num_buckets=4, max_distance=2, bidirectional=True)
    experts_in(ExpertGroups(num_groups=4, num_kept=2, scored_by="top2_sum"), num_chosen=4)
    replace(EXPERTS, num_chosen=8)
    Dropout(residual=0.999)
    translator(share_embeddings=True)


@pytest.mark.parametrize("config", CONFIG_CLASSES, ids=lambda config: config.__name__)
def test_config_classes_are_frozen_and_keyword_only(config):
    assert config.__dataclass_params__.frozen
    assert all(item.kw_only for item in fields(config))


@pytest.mark.parametrize("config", CONFIG_CLASSES, ids=lambda config: config.__name__)
def test_optional_fields_default_to_none(config):
    """A serialized config omits None, so reading it back must restore None."""
    hints = get_type_hints(config)
    for item in fields(config):
        if NoneType in get_args(hints[item.name]):
            required = item.default is MISSING and item.default_factory is MISSING
            assert not required
            assert item.default is None


def test_configs_compare_and_hash_by_value_and_are_immutable():
    assert translator() == translator()
    assert hash(translator()) == hash(translator())
    assert len({grouped(), grouped(), latent(), grouped(softcap=1.0)}) == 3
    with pytest.raises(FrozenInstanceError):
        grouped().num_heads = 8


def test_a_list_of_layers_becomes_a_tuple():
    config = decoder()
    from_list = replace(config, decoder=replace(config.decoder, layers=list(config.decoder.layers)))
    assert from_list == config
    assert from_json(ModelConfig, to_json(from_list)) == config


def test_output_stack_and_vocab_size_are_those_of_the_decoder_if_there_is_one():
    assert translator().is_encoder_decoder
    assert not decoder().is_encoder_decoder
    assert not encoder().is_encoder_decoder
    assert translator().output_stack == translator().decoder
    assert encoder().output_stack == encoder().encoder
    other_source = replace(translator(), encoder=replace(translator().encoder, embedding=Embedding(vocab_size=5)))
    assert other_source.vocab_size == translator().decoder.embedding.vocab_size


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: grouped(pattern="causal"),
            "GroupedAttention.pattern is 'causal'; it must be Bidirectional or Causal or",
        ),
        (lambda: Rope(scaling=8.0), "Rope.scaling is 8.0; it must be"),
        (lambda: FeedForward(width=8.0, activation="silu"), "FeedForward.width is 8.0; it must be a whole number"),
        (lambda: FeedForward(width=True, activation="silu"), "FeedForward.width is True; it must be a whole number"),
        (lambda: RmsNorm(epsilon="1e-5"), "RmsNorm.epsilon is '1e-5'; it must be a number"),
        (lambda: Dropout(residual="0.1"), "Dropout.residual is '0.1'; it must be a number"),
        (lambda: replace(decoder(Rope()), dropout=0.1), "ModelConfig.dropout is 0.1; it must be Dropout"),
        (lambda: replace(decoder(Rope()).decoder, layers=(1,)), r"Stack.layers is \(1,\); it must be a tuple of Layer"),
        (
            lambda: replace(decoder(Rope()).decoder.layers[0], attention=None),
            "Layer.attention is None; it must be GroupedAttention or",
        ),
    ],
)
def test_a_value_of_the_wrong_type_is_rejected(make, message):
    with pytest.raises(ClearheadError, match=message):
        make()


@pytest.mark.parametrize("name", ["beta_fast", "beta_slow"])
@pytest.mark.parametrize("number", [1e30, 1e-320])
def test_a_number_of_rotations_without_a_logarithm_is_rejected(name, number):
    """A mutated config.json of DeepSeek with such a beta_fast gave a math domain error when the network was used."""
    with pytest.raises(ClearheadError, match=rf"YarnScaling\.{name} is .*; it must be from 1e-09 to 1e\+09"):
        replace(YARN, **{name: number})
