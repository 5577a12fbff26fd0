"""Every kind of block in the CPU kernels, against the modules: contiguous, padded, in pages, and bit by bit."""

from dataclasses import replace

import pytest
import torch

from clearhead.architecture import (
    Alibi,
    Chunked,
    DeviationNorm,
    ExpertGroups,
    Experts,
    FeedForward,
    GateClamp,
    HeadNorm,
    LayerNorm,
    ModelConfig,
    QueryTemperature,
    RelativeBuckets,
    RmsNorm,
    Rope,
    RotatedHeadNorm,
    Router,
    ScoreTemperature,
    SlidingWindow,
)
from clearhead.backends.cpu.plan import Plan
from clearhead.backends.cpu.stack import accelerate
from clearhead.backends.modules import pack_network
from clearhead.families import preset
from clearhead.model import Transformer
from tests.backends.networks import logits_of
from tests.backends.packed_sequences import PackedSequences, random_texts, run_mixed, same_bits
from tests.model.toys import FEED_FORWARD, NORM, VOCAB, decoder, latent, redraw
from tests.toy_presets import shrink

LAYER_NORM = LayerNorm(epsilon=1e-5)
BUCKETS = RelativeBuckets(num_buckets=8, max_distance=16)
SOFTMAX = Router(score="softmax", renormalize_epsilon=0.0)
SIGMOID = Router(score="sigmoid", renormalize_epsilon=1e-20, selection_bias=True, scale=2.5)
GATED = FeedForward(width=24, activation="silu", gated=True)


def with_layers(config: ModelConfig, **changes) -> ModelConfig:
    """Return a config with other settings in all layers of its decoder."""
    layers = tuple(replace(layer, **changes) for layer in config.decoder.layers)
    return replace(config, decoder=replace(config.decoder, layers=layers))


def with_activation(activation: str) -> ModelConfig:
    return with_layers(decoder(), feed_forward=replace(FEED_FORWARD, activation=activation))


def with_experts(router: Router, **changes) -> ModelConfig:
    """Return a decoder with six experts in each layer, of which two are chosen."""
    experts = {"num_experts": 6, "num_chosen": 2, "expert": replace(GATED, width=40), "router": router}
    return with_layers(decoder(position=Rope()), feed_forward=Experts(**(experts | changes)))


def with_head_norm(head_norm) -> ModelConfig:
    return decoder(head_norm=head_norm, position=Rope(width=2))


KINDS = {
    "branch": with_layers(decoder(position=Rope()), placement="branch"),
    "parallel": with_layers(decoder(position=Rope()), placement="parallel", norm=LAYER_NORM),
    "parallel gated": with_layers(decoder(position=Rope()), placement="parallel", feed_forward=GATED),
    "parallel_norms": with_layers(decoder(position=Rope(width=2)), placement="parallel_norms", norm=LAYER_NORM),
    **{
        f"scaled {placement}": with_layers(decoder(position=Rope()), branch_scale=0.4, placement=placement)
        for placement in ("pre", "post", "sandwich", "branch", "parallel", "parallel_norms")
    },
    "layer norm without weight": with_layers(decoder(), norm=LayerNorm(epsilon=1e-5, weight=False, bias=False)),
    "layer norm with offset": with_layers(decoder(), norm=LayerNorm(epsilon=1e-5, unit_offset=True)),
    "deviation norm": with_layers(decoder(), norm=DeviationNorm(epsilon=1e-6)),
    **{name: with_activation(name) for name in ("relu_squared", "gelu_quick", "tanh", "xielu")},
    "clamped gate": with_layers(
        decoder(), feed_forward=replace(GATED, activation="gelu_quick", clamp=GateClamp(limit=0.7))
    ),
    "clip": decoder(clip=0.8, position=Rope()),
    "joint head norm": with_head_norm(HeadNorm(norm=NORM, scope="joint")),
    "joint head layer norm": with_head_norm(HeadNorm(norm=LAYER_NORM, scope="joint")),
    "norm per head": with_head_norm(HeadNorm(norm=NORM, scope="per_head")),
    "layer norm per head": with_head_norm(HeadNorm(norm=LayerNorm(epsilon=1e-5, bias=False), scope="per_head")),
    "head layer norm": with_head_norm(HeadNorm(norm=LAYER_NORM)),
    "head norm after rotation": with_head_norm(HeadNorm(norm=RmsNorm(epsilon=1e-5), after_rotation=True)),
    "rotated head norm": with_head_norm(RotatedHeadNorm(epsilon=1e-5)),
    "alibi": decoder(position=Alibi()),
    "alibi in a window": decoder(position=Alibi(), pattern=SlidingWindow(size=5)),
    "buckets": decoder(position=BUCKETS),
    "buckets in every layer": decoder(position=replace(BUCKETS, per_layer=True), pattern=Chunked(size=9)),
    "softcap": decoder(softcap=0.8, position=Rope()),
    "query temperature": decoder(temperature=QueryTemperature(floor=3, scale=0.7), softcap=2.0, position=Rope()),
    "score temperature": decoder(temperature=ScoreTemperature(length=3), softcap=2.0, position=Alibi()),
    "sinks": decoder(sinks=True, position=Rope(), pattern=SlidingWindow(size=5)),
    "sinks of wide heads": decoder(sinks=True, position=Alibi(), head_width=32, num_kv_heads=1),
    "latent": with_layers(decoder(), attention=latent()),
    "latent without query rank": with_layers(decoder(), attention=latent(query_rank=None, rope=Rope())),
    "latent of wide heads": with_layers(
        decoder(), attention=latent(latent_rank=48, plain_width=20, rotary_width=16, value_width=33)
    ),
    "experts": with_experts(SOFTMAX),
    "plain experts": with_experts(replace(SOFTMAX, renormalize_epsilon=None, scale=1.7), expert=FEED_FORWARD),
    "shared expert": with_experts(SIGMOID, shared=replace(GATED, width=20), divisor=1.4),
    "gated shared expert": with_experts(SOFTMAX, shared=FEED_FORWARD, shared_gate=True),
    "groups of experts": with_experts(
        replace(SIGMOID, groups=ExpertGroups(num_groups=3, num_kept=2, scored_by="top2_sum"))
    ),
    "best groups of experts": with_experts(
        replace(SOFTMAX, groups=ExpertGroups(num_groups=3, num_kept=2, scored_by="max"), softcap=0.9)
    ),
    "weighted inputs": with_experts(Router(score="sigmoid", weighs="input"), num_chosen=1, shared=GATED),
    "clamped experts": with_experts(
        replace(SOFTMAX, bias=True),
        expert=FeedForward(width=40, activation="gelu_quick", gated=True, bias=True, clamp=GateClamp(limit=0.7)),
        num_chosen=6,
    ),
    "parallel experts": with_layers(with_experts(SOFTMAX), placement="parallel", branch_scale=0.6),
    "experts between norms": with_layers(with_experts(SOFTMAX), placement="sandwich"),
}
FAMILIES = [
    *("pythia-160m", "falcon-40b", "gpt-j-6b", "codegen-350m", "falcon-7b", "phi-2", "command-r", "palm-8b"),
    *("olmo-2-1b", "olmo-3-7b", "exaone-4.0-32b", "granite-3.1-2b", "olmo-1b", "minitron-4b", "afm-4.5b"),
    *("apertus-8b", "hunyuan-7b", "bloom-560m", "mpt-7b-storywriter", "gemma-2-2b"),
    *("qwen3-30b-a3b", "llama-4-scout", "llama-4-maverick", "grok-1", "grok-2", "glm-4.5-air", "mixtral-8x7b"),
    *("granite-3.1-1b-a400m", "olmoe-1b-7b", "qwen1.5-moe-a2.7b", "gpt-oss-20b", "deepseek-v2-lite", "deepseek-v3"),
]

pytestmark = pytest.mark.usefixtures("kernels")


def network_of(name: str, dtype: torch.dtype = torch.float32) -> Transformer:
    """Return the toy network of a kind or of a preset."""
    torch.manual_seed(0)
    network = Transformer(KINDS[name] if name in KINDS else shrink(preset(name)))
    redraw(network)
    for name, buffer in network.named_buffers():
        if name.endswith("selection_bias"):  # load balancing sets it, so that redraw does not
            buffer.copy_(torch.linspace(-0.4, 0.4, len(buffer)))
    return network.to(dtype).eval()


@pytest.fixture
def num_plans(monkeypatch) -> list[str]:
    """The calls of the kernels, by name."""
    calls = []
    for method in ("run", "run_rows", "run_packed"):
        original = getattr(Plan, method)
        monkeypatch.setattr(
            Plan, method, lambda plan, *inputs, m=method, f=original: calls.append(m) or f(plan, *inputs)
        )
    return calls


@pytest.mark.parametrize(
    ("name", "padded"),
    [*((name, padded) for name in KINDS for padded in (False, True)), *((n, True) for n in FAMILIES)],
)
def test_prompts_and_single_tokens_give_the_logits_and_cache_of_the_modules(name, padded, num_plans):
    network = network_of(name)
    tokens = torch.randint(0, VOCAB, (3, 24), generator=torch.Generator().manual_seed(1))
    mask = None
    if padded:
        mask = torch.ones(3, 24, dtype=torch.bool)
        mask[0, :3] = mask[2, :1] = False
    expected, plain_cache = logits_of(network, tokens, mask, prompt_length=19)
    assert accelerate(network)
    found, cache = logits_of(network, tokens, mask, prompt_length=19)
    assert num_plans.count("run") >= 5 or (padded and name.startswith(("latent", "deepseek")))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    for ours, theirs in zip(cache.stores, plain_cache.stores, strict=True):
        torch.testing.assert_close(ours.key[1], theirs.key[1], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [*KINDS, *FAMILIES])
def test_packed_tokens_give_the_hidden_states_of_the_modules(name, num_plans):
    network = network_of(name)
    expected = run_mixed(network)
    assert accelerate(network)
    found = run_mixed(network)
    assert num_plans == ["run_packed"] * 7
    for ours, theirs in zip(found.results(), expected.results(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("name", "bits"),
    [*((name, None) for name in KINDS), *((name, "int8") for name in ("parallel gated", "sinks", "shared expert"))],
)
def test_the_bits_of_a_token_depend_on_its_sequence_alone(name, bits):
    """Every sequence alone, token by token; whole; in pieces; and among others."""
    network = network_of(name, torch.float32 if bits is None else torch.bfloat16)
    if bits is not None:
        pack_network(network, bits)
    assert accelerate(network)
    lengths = (40, 20, 13)
    texts = random_texts(lengths)
    alone = []
    for text in texts:
        sequence = PackedSequences(network, [text])
        for _ in text:
            sequence.step({0: 1})
        alone += sequence.results()
    whole, pieces = PackedSequences(network, texts), PackedSequences(network, texts, page_size=32)
    whole.step(dict(enumerate(lengths)))
    for counts in ({2: 3, 0: 30}, {2: 1, 0: 1, 1: 9}, {1: 1, 0: 2, 2: 9}, {0: 7, 1: 10}):
        pieces.step(counts)
    for run in (whole, pieces):
        for expected, found in zip(alone, run.results(), strict=True):
            assert same_bits(found, expected)


@pytest.mark.parametrize("bits", [None, "int8", "int4"])
def test_many_tokens_of_wide_experts(bits):
    """More tokens than are grouped at a time, and experts whose columns are several tasks; then few tokens."""
    config = with_experts(SOFTMAX, num_experts=5, num_chosen=3, expert=replace(GATED, width=300), shared=GATED)
    network = Transformer(replace(config, width=192))
    redraw(network)
    if bits is not None:
        pack_network(network, bits)
    network.eval()
    texts = random_texts((700, 6))
    results = []
    for _ in range(2):
        sequences = PackedSequences(network, texts, page_size=64)
        sequences.step({0: 650, 1: 2})
        for _ in range(3):
            sequences.step({0: 1, 1: 1})
        results.append(torch.cat(sequences.results()))
        assert accelerate(network)
    expected, found = results
    if bits is None:
        torch.testing.assert_close(found, expected, atol=3e-4, rtol=2e-4)
    else:  # rounding of the inputs may exchange experts of close scores in a few tokens
        errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert errors.median() < 0.02


def test_a_changed_router_or_shared_bias_is_noticed():
    tokens = torch.randint(0, VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))
    for name, parameter in (
        ("experts", "decoder.layers.0.feed_forward.router.weight"),
        ("buckets", "decoder.relative_bias.weight"),
    ):
        network = network_of(name)
        assert accelerate(network)
        logits_of(network, tokens)
        with torch.no_grad():
            network.get_parameter(parameter).mul_(-2)
        found, _ = logits_of(network, tokens)
        plain = network_of(name)
        with torch.no_grad():
            plain.get_parameter(parameter).mul_(-2)
        torch.testing.assert_close(found, logits_of(plain, tokens)[0], atol=2e-4, rtol=1e-4)
