"""Initial weights: each row of the table in the module docstring, tested by statistics of the drawn values."""

import math
import re
import resource
from dataclasses import replace

import pytest
import torch

from clearhead.architecture import (
    Bidirectional,
    DeviationNorm,
    Embedding,
    Experts,
    FanInInitial,
    FeedForward,
    Head,
    HeadNorm,
    HeadTransform,
    LayerNorm,
    LearnedPositions,
    ModelConfig,
    NormalInitial,
    RelativeBuckets,
    RelativeSinusoid,
    RmsNorm,
    Router,
    SinusoidalPositions,
    Stack,
    XavierInitial,
)
from clearhead.families import preset, shrink
from clearhead.model import initialize
from clearhead.model.transformer import Transformer
from tests.model.toys import grouped, latent, layer

WIDTH, DEVIATION = 64, 0.05
EXPERTS = Experts(
    num_experts=8,
    num_chosen=2,
    expert=FeedForward(width=40, activation="silu", gated=True),
    router=Router(score="sigmoid", selection_bias=True),
    shared=FeedForward(width=40, activation="silu", gated=True, bias=True),
)
PLAIN = FeedForward(width=100, activation="relu", bias=True)


def config_with_all_weights(initial: NormalInitial | XavierInitial | FanInInitial) -> ModelConfig:
    """Return an encoder-decoder config that has every kind of weight."""
    embedding = Embedding(
        vocab_size=300,
        positions=LearnedPositions(num_positions=50),
        num_token_types=40,
        norm=LayerNorm(epsilon=1e-5),
    )
    bidirectional = grouped(pattern=Bidirectional(), output_bias=True)
    encoder = Stack(
        embedding=embedding,
        layers=(
            layer(replace(bidirectional, position=RelativeBuckets(bidirectional=True)), feed_forward=PLAIN),
            layer(latent(query_rank=48, latent_rank=40, pattern=Bidirectional()), feed_forward=EXPERTS),
        ),
        final_norm=RmsNorm(epsilon=1e-5, unit_offset=True),
    )
    normed = grouped(head_width=16, head_norm=HeadNorm(norm=RmsNorm(epsilon=1e-5)), position=RelativeSinusoid())
    decoder = Stack(
        embedding=replace(embedding, positions=SinusoidalPositions()),
        layers=(layer(normed, cross_attention=bidirectional, feed_forward=PLAIN, placement="sandwich"),),
        final_norm=DeviationNorm(epsilon=1e-5),
    )
    head = Head(tied=False, bias=True, transform=HeadTransform(activation="gelu", norm=LayerNorm(epsilon=1e-5)))
    return ModelConfig(
        width=WIDTH, context=50, encoder=encoder, decoder=decoder, head=head, pooler=True, initial=initial
    )


def initial_parameters(initial: NormalInitial | XavierInitial | FanInInitial) -> dict[str, torch.Tensor]:
    """Return the freshly initialized parameters by name."""
    torch.manual_seed(0)
    return dict(Transformer(config_with_all_weights(initial)).named_parameters())


def table_row(name: str) -> str:
    """Return the row of the table that a parameter of `config_with_all_weights` belongs to."""
    if re.search(r"(^|[._])(final_|branch_|query_|key_|latent_)?norm\.", name):
        return "norms"
    if name.endswith("bias"):
        return "biases"
    if re.search(r"embedding\.(tokens|positions|types)|relative_bias|^head\.weight", name):
        return "embeddings"
    if re.search(r"\.output\.weight|feed_forward\.(shared\.)?down", name):
        return "branch outputs"
    return "matrices"


def test_the_table_in_the_docstring_covers_all_parameters():
    rows = re.findall(r"^    ([a-z][a-z ]*?)  +\S", initialize.__doc__, re.MULTILINE)
    assert rows == ["norms", "biases", "embeddings", "matrices", "branch outputs"]
    assert {table_row(name) for name in initial_parameters(NormalInitial())} == set(rows)


@pytest.mark.parametrize("initial", [NormalInitial(), XavierInitial(), FanInInitial()], ids=str)
def test_norms_start_as_the_identity_and_biases_at_zero(initial):
    parameters = initial_parameters(initial)
    for name, parameter in parameters.items():
        if table_row(name) == "norms":
            expected = 0.0 if name.endswith("bias") or name == "encoder.final_norm.weight" else 1.0
            assert torch.equal(parameter, torch.full_like(parameter, expected)), name
        elif table_row(name) == "biases":
            assert not parameter.any(), name
    assert {name.rpartition(".")[2] for name in parameters if table_row(name) == "biases"} == {
        "bias",
        "content_bias",
        "distance_bias",
    }


def assert_normal(parameter: torch.Tensor, deviation: float, name: str) -> None:
    """Check mean, deviation and the fraction beyond one deviation, each within four standard errors."""
    count = parameter.numel()
    assert abs(parameter.mean().item()) < 4 * deviation / math.sqrt(count), name
    assert abs(parameter.std().item() / deviation - 1) < 4 / math.sqrt(2 * count), name
    beyond = (parameter.abs() > deviation).float().mean().item()
    assert abs(beyond - 0.3173) < 4 * math.sqrt(0.3173 * 0.6827 / count), name


@pytest.mark.parametrize("residual_scaled", [False, True])
def test_normal_weights_have_the_configured_deviation(residual_scaled):
    """With residual_scaled, branch outputs are divided by √(2L), where L = 3."""
    for name, parameter in initial_parameters(
        NormalInitial(deviation=DEVIATION, residual_scaled=residual_scaled)
    ).items():
        if table_row(name) in ("embeddings", "matrices"):
            assert_normal(parameter, DEVIATION, name)
        elif table_row(name) == "branch outputs":
            assert_normal(parameter, DEVIATION / math.sqrt(6) if residual_scaled else DEVIATION, name)


def test_branch_outputs_are_all_matrices_that_write_to_the_residual_stream():
    """There is one per branch: attention, cross-attention, feed-forward, the experts and the shared expert."""
    branch_outputs = sorted(name for name in initial_parameters(NormalInitial()) if table_row(name) == "branch outputs")
    assert branch_outputs == [
        "decoder.layers.0.attention.output.weight",
        "decoder.layers.0.cross_attention.output.weight",
        "decoder.layers.0.feed_forward.down.weight",
        "encoder.layers.0.attention.output.weight",
        "encoder.layers.0.feed_forward.down.weight",
        "encoder.layers.1.attention.output.weight",
        "encoder.layers.1.feed_forward.down",
        "encoder.layers.1.feed_forward.shared.down.weight",
    ]


def test_xavier_matrices_are_uniform_within_their_bound():
    for name, parameter in initial_parameters(XavierInitial()).items():
        if table_row(name) == "embeddings":
            assert_normal(parameter, WIDTH**-0.5, name)
        elif table_row(name) in ("matrices", "branch outputs"):
            bound = math.sqrt(6 / (parameter.shape[-2] + parameter.shape[-1]))  # each expert has its own bound
            assert 0.95 * bound < parameter.abs().max() <= bound, name
            count = parameter.numel()
            assert abs(parameter.var().item() / (bound**2 / 3) - 1) < 4 * math.sqrt(0.8 / count), name


def test_xavier_with_tables_also_draws_embeddings_and_the_head():
    """The code of the Annotated Transformer draws every parameter with more than one dimension."""
    for name, parameter in initial_parameters(XavierInitial(tables=True)).items():
        if table_row(name) in ("embeddings", "matrices", "branch outputs"):
            bound = math.sqrt(6 / (parameter.shape[-2] + parameter.shape[-1]))
            assert 0.95 * bound < parameter.abs().max() <= bound, name


def test_fan_in_keeps_the_size_of_inputs_and_draws_standard_normal_embeddings():
    for name, parameter in initial_parameters(FanInInitial()).items():
        if table_row(name) == "embeddings":
            assert_normal(parameter, 1.0, name)
        elif table_row(name) in ("matrices", "branch outputs"):
            assert_normal(parameter, parameter.shape[-1] ** -0.5, name)


def test_palm_starts_with_logits_of_order_one():
    """Embeddings from N(0, 1) and logits times width^-0.5; at toy size the factor follows the width."""
    config = shrink(preset("palm-540b"))
    assert config.head.scale == config.width**-0.5
    torch.manual_seed(0)
    network = Transformer(config)
    tokens = torch.randint(0, config.vocab_size, (4, 16))
    with torch.no_grad():
        assert 0.5 < network(tokens).std() < 2.0
        assert 0.9 < network.decoder.embedding(tokens, torch.arange(16)[None]).std() < 1.1


def test_shared_and_tied_tables_exist_once():
    config = config_with_all_weights(NormalInitial())
    shared = replace(
        config,
        share_embeddings=True,
        head=Head(),
        decoder=replace(config.decoder, embedding=config.encoder.embedding),
    )
    network = Transformer(shared)
    names = [name for name, _ in network.named_parameters() if name.endswith("embedding.tokens.weight")]
    assert names == ["encoder.embedding.tokens.weight"]
    assert network.head.weight is None


def test_selection_bias_starts_at_zero():
    buffers = dict(Transformer(config_with_all_weights(NormalInitial())).named_buffers())
    assert list(buffers) == ["encoder.layers.1.feed_forward.router.selection_bias"]
    assert not next(iter(buffers.values())).any()


def test_the_largest_model_takes_no_memory_on_the_meta_device():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.device("meta"):
        network = Transformer(preset("llama-3.1-405b"))
    grown_kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert all(parameter.is_meta for parameter in network.parameters())
    assert sum(parameter.numel() for parameter in network.parameters()) > 4e11
    assert grown_kilobytes < 200_000
